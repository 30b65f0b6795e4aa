// What a call has to look like for a unit to replay it.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

#include "values.h"

namespace fxwrap {

// Addresses [begin, end), in order.
using Spans = std::vector<std::pair<uint64_t, uint64_t>>;

struct Guards {
  std::vector<std::pair<Py_ssize_t, uint64_t>> addresses;  // (position, address)
  std::vector<std::pair<Py_ssize_t, int64_t>> numbers;     // (position, value)
  // (position, whether it is a stride or else a size, dimension, value)
  std::vector<std::tuple<Py_ssize_t, bool, int64_t, int64_t>> dimensions;
  struct Count {
    c10::StorageImpl* storage;
    size_t uses;
  };
  struct Cell {
    const int64_t* at;
    int64_t value;
  };
  py::object packed;  // a dictionary
  std::vector<Py_ssize_t> overwritten;
  // For graphs/replay/overlaps.py, which has the rule: (position, whether it is mutated), and addresses of static inputs.
  std::vector<std::pair<Py_ssize_t, bool>> moving;
  Spans static_spans, written_static_spans;
  bool no_hooks = false;          // nobody packs what autograd saves
  std::optional<at::Device> device;
  std::vector<const int64_t*> streams;
  std::vector<std::pair<py::object, int64_t*>> locks;
  py::object caller_captures, kept;
  std::vector<Count> counts;
  std::vector<Cell> versions;

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(packed.ptr());
    for (const auto& lock : locks) Py_VISIT(lock.first.ptr());
    Py_VISIT(caller_captures.ptr());
    Py_VISIT(kept.ptr());
    return 0;
  }

  // None of a class that answers in Python.
  static const at::Tensor* tensor_at(PyObject* inputs, Py_ssize_t position) {
    auto* value = PyList_GET_ITEM(inputs, position);
    if (!THPVariable_Check(value)) return nullptr;
    const auto& tensor = THPVariable_Unpack(value);
    return tensor.unsafeGetTensorImpl()->is_python_dispatch() ? nullptr : &tensor;
  }

  // Whether no other call works in the memory, and no live output is overwritten.
  bool is_free() const {
    for (const auto& [owners, native] : locks)
      if (PyDict_GET_SIZE(owners.ptr()) != 0 || *native == process) return false;
    for (const auto& [at, value] : versions)
      if (*at != value) return false;
    for (const auto& [storage, uses] : counts)
      if (c10::raw::intrusive_ptr::use_count(storage) != uses) return false;
    return true;
  }

  // Whether the caller captures on the current stream. May run Python.
  bool is_captured() const {
    if (!device.has_value() || !caller_captures) return false;
    if (c10::impl::getDeviceGuardImpl(device->type())->getStream(*device).id() == 0) return false;  // it cannot be
    auto asked = caller_captures;  // the unit may be gone before it has answered
    return py::cast<bool>(owned(PyObject_CallNoArgs(asked.ptr())));
  }

  bool device_suits() const {
    if (!device.has_value()) return true;
    const auto* guard = c10::impl::getDeviceGuardImpl(device->type());
    if (guard->getDevice() != *device) return false;
    const auto stream = guard->getStream(*device).id();
    return std::all_of(streams.begin(), streams.end(), [&](const auto* last) { return *last == stream; });
  }

  bool is_packed(const at::Tensor* tensor) const {
    if (tensor == nullptr) return true;
    auto handle = owned(PyLong_FromVoidPtr(tensor->storage().unsafeGetStorageImpl()));
    return PyDict_Contains(packed.ptr(), handle.ptr()) != 0;
  }

  static bool touches(const Spans& spans, uint64_t begin, uint64_t end) {
    auto after = std::lower_bound(spans.begin(), spans.end(), end, [](const auto& span, uint64_t at) { return span.first < at; });
    return after != spans.begin() && std::prev(after)->second > begin;
  }

  // The quick form of the rule in graphs/replay/overlaps.py.
  bool apart(PyObject* inputs) const {
    struct Span {
      uint64_t begin, end;
      bool written;
    };
    c10::SmallVector<Span, 16> spans;
    for (const auto& [position, written] : moving) {
      const auto* tensor = tensor_at(inputs, position);
      if (tensor == nullptr) return false;
      const auto begin = reinterpret_cast<uint64_t>(tensor->mutable_data_ptr());
      const auto end =
          begin + at::detail::computeStorageNbytes(tensor->sizes(), tensor->strides(), tensor->element_size());
      if (begin == end) continue;
      if (touches(written ? static_spans : written_static_spans, begin, end)) return false;
      spans.push_back({begin, end, written});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    uint64_t reached = 0, reached_written = 0;
    for (const auto& span : spans) {
      if (span.begin < reached_written || (span.written && span.begin < reached)) return false;
      reached = std::max(reached, span.end);
      if (span.written) reached_written = std::max(reached_written, span.end);
    }
    return true;
  }

  bool hold(PyObject* inputs) const {
    if (!is_free()) return false;
    if (!overwritten.empty() && PyDict_GET_SIZE(packed.ptr()) != 0)
      for (const auto position : overwritten)
        if (is_packed(tensor_at(inputs, position))) return false;
    for (const auto& [position, value] : numbers) {
      auto* number = PyList_GET_ITEM(inputs, position);
      if (!PyLong_CheckExact(number)) return false;
      int overflow = 0;
      if (PyLong_AsLongLongAndOverflow(number, &overflow) != value || overflow != 0) return false;
    }
    for (const auto& [position, stride, dimension, value] : dimensions) {
      const auto* tensor = tensor_at(inputs, position);
      if (tensor == nullptr || tensor->dim() <= dimension) return false;
      if ((stride ? tensor->stride(dimension) : tensor->size(dimension)) != value) return false;
    }
    for (const auto& [position, address] : addresses) {
      const auto* tensor = tensor_at(inputs, position);
      // A lazy clone gets memory of its own by this question, and so has moved.
      if (tensor == nullptr || reinterpret_cast<uint64_t>(tensor->mutable_data_ptr()) != address) return false;
    }
    if (!moving.empty() && !apart(inputs)) return false;
    return !no_hooks || !at::SavedTensorDefaultHooks::get_hooks(true).has_value();
  }
};

}  // namespace fxwrap
