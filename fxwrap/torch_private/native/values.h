// What a unit works on: slots, and operands that name them.

#pragma once

#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fxwrap {

// Who holds a lock: what another thread was doing in the parent of a fork is nobody's work in the child.
inline int64_t process = 0;
// Whether this process was forked after the library was loaded.
inline bool is_forked = false;

// Whether this thread has the interpreter's lock, and lets go of it for steps that need no Python.
class InterpreterLock {
 public:
  ~InterpreterLock() { acquire(); }
  void acquire() {
    if (state_ != nullptr) PyEval_RestoreThread(std::exchange(state_, nullptr));
  }
  void release() {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_ = nullptr;
};

// What a step has made or was given: a tensor, a number, or any other object of Python's.
struct Slot {
  enum class Kind { Nothing, Tensor, Integer, Boolean, Object };

  Kind kind = Kind::Nothing;
  int64_t number = 0;
  at::Tensor tensor;
  py::object object;

  void clear() {
    kind = Kind::Nothing;
    tensor.reset();
    if (object) {
      py::gil_scoped_acquire locked;
      object = py::object();
    }
  }
  bool is_number() const { return kind == Kind::Integer || kind == Kind::Boolean; }
  void set(at::Tensor value) {
    if (kind == Kind::Object) clear();
    tensor = std::move(value);
    kind = Kind::Tensor;
  }
  void set(int64_t value, bool boolean = false) {
    if (kind == Kind::Object) clear();
    number = value;
    kind = boolean ? Kind::Boolean : Kind::Integer;
  }
  void set(PyObject* value) {  // steals nothing
    if (THPVariable_Check(value)) return set(THPVariable_Unpack(value));
    if (value == Py_None) return clear();
    if (PyBool_Check(value)) return set(value == Py_True, true);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      auto converted = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow == 0) return set(converted);
    }
    object = py::reinterpret_borrow<py::object>(value);
    kind = Kind::Object;
  }
  PyObject* get() const {  // a new reference
    switch (kind) {
      case Kind::Tensor:
        return THPVariable_Wrap(tensor);
      case Kind::Integer:
        return PyLong_FromLongLong(number);
      case Kind::Boolean:
        return PyBool_FromLong(static_cast<long>(number));
      case Kind::Object:
        return Py_NewRef(object.ptr());
      case Kind::Nothing:
        break;
    }
    Py_RETURN_NONE;
  }
};

using Slots = std::vector<Slot>;
inline const Slots kNoSlots;

// Thrown where no step can be made of such operands: it is a call of Python then.
struct NotNative {};

// The slots of what a step makes; nothing, where nobody reads it.
using Results = std::vector<std::optional<size_t>>;
inline size_t only(const Results& results) {
  if (results.size() != 1 || !results[0]) throw NotNative();
  return *results[0];
}

inline py::object owned(PyObject* value) {
  if (value == nullptr) throw python_error();
  return py::reinterpret_steal<py::object>(value);
}

// A value of Python's in which slots stand for what is in them.
class Value {
 public:
  enum class Kind { Constant, Slot, Tuple, List, Slice, Dict };
  using Parts = std::vector<Value>;

  explicit Value(py::object constant) : kind_(Kind::Constant), constant_(std::move(constant)) {}
  explicit Value(size_t slot) : kind_(Kind::Slot), slot_(slot) {}
  Value(Kind kind, Parts parts, std::vector<py::object> names = {})
      : kind_(kind), parts_(std::move(parts)), names_(std::move(names)) {}

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(constant_.ptr());
    for (const auto& name : names_) Py_VISIT(name.ptr());
    for (const auto& part : parts_)
      if (auto stop = part.traverse(visit, arg)) return stop;
    return 0;
  }

  bool is_slot() const { return kind_ == Kind::Slot; }
  bool is_tuple() const { return kind_ == Kind::Tuple; }
  bool is_constant() const {
    if (kind_ == Kind::Slot) return false;
    for (const auto& part : parts_)
      if (!part.is_constant()) return false;
    return true;
  }
  size_t slot() const { return slot_; }
  const Parts& parts() const { return parts_; }
  const std::vector<py::object>& names() const { return names_; }

  py::object make(const Slots& slots = kNoSlots) const {
    switch (kind_) {
      case Kind::Constant:
        return constant_;
      case Kind::Slot:
        return owned(slots[slot_].get());
      case Kind::Slice: {
        std::array<py::object, 3> bounds;
        for (size_t i = 0; i < 3; ++i) bounds[i] = parts_[i].make(slots);
        return owned(PySlice_New(bounds[0].ptr(), bounds[1].ptr(), bounds[2].ptr()));
      }
      case Kind::Dict: {
        py::dict made;
        for (size_t i = 0; i < parts_.size(); ++i) made[names_[i]] = parts_[i].make(slots);
        return std::move(made);
      }
      case Kind::List: {
        py::list made(parts_.size());
        for (size_t i = 0; i < parts_.size(); ++i)
          PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), parts_[i].make(slots).release().ptr());
        return std::move(made);
      }
      case Kind::Tuple:
        break;
    }
    py::tuple made(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i)
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), parts_[i].make(slots).release().ptr());
    return std::move(made);
  }

 private:
  Kind kind_;
  py::object constant_;
  size_t slot_ = 0;
  Parts parts_;
  std::vector<py::object> names_;
};

// A tensor that is known, or in a slot.
class Operand {
 public:
  explicit Operand(const Value& value) {
    if (value.is_slot()) {
      slot_ = static_cast<long>(value.slot());
      return;
    }
    auto tensor = value.make();
    if (!THPVariable_Check(tensor.ptr())) throw NotNative();
    tensor_ = THPVariable_Unpack(tensor.ptr());
  }
  const at::Tensor& in(const Slots& slots) const { return slot_ < 0 ? tensor_ : slots[static_cast<size_t>(slot_)].tensor; }

 private:
  long slot_ = -1;
  at::Tensor tensor_;
};

// A number that is known, or in a slot.
class Number {
 public:
  explicit Number(const Value& value) {
    if (value.is_slot()) {
      slot_ = static_cast<long>(value.slot());
      return;
    }
    auto number = value.make();
    int overflow = 0;
    if (!PyLong_CheckExact(number.ptr())) throw NotNative();
    number_ = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0) throw NotNative();
  }
  bool known() const { return slot_ < 0; }
  bool there(const Slots& slots) const { return known() || slots[static_cast<size_t>(slot_)].is_number(); }
  int64_t in(const Slots& slots = kNoSlots) const {
    if (known()) return number_;
    const auto& slot = slots[static_cast<size_t>(slot_)];
    TORCH_CHECK_TYPE(slot.is_number(), "fxwrap: a size is no integer");
    return slot.number;
  }

 private:
  long slot_ = -1;
  int64_t number_ = 0;
};

// Sizes or strides.
class Sizes {
 public:
  explicit Sizes(const Value& tuple) {
    if (tuple.is_constant()) {
      auto sizes = tuple.make();
      if (!PyTuple_Check(sizes.ptr())) throw NotNative();
      for (auto size : sizes) parts_.emplace_back(Value(py::reinterpret_borrow<py::object>(size)));
    } else if (tuple.is_tuple()) {
      for (const auto& part : tuple.parts()) parts_.emplace_back(part);
    } else {
      throw NotNative();
    }
    known_ = std::all_of(parts_.begin(), parts_.end(), [](const Number& part) { return part.known(); });
    values_.resize(parts_.size());
    if (known_) evaluate(kNoSlots);
  }
  at::IntArrayRef in(const Slots& slots) {
    if (!known_) evaluate(slots);
    return values_;
  }

 private:
  void evaluate(const Slots& slots) {
    for (size_t i = 0; i < parts_.size(); ++i) values_[i] = parts_[i].in(slots);
  }
  bool known_ = true;
  std::vector<Number> parts_;
  std::vector<int64_t> values_;
};

}  // namespace fxwrap
