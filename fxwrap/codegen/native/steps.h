// Steps that call no function of Python: kernels, operators, memory.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <torch/csrc/inductor/inductor_ops.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "values.h"

namespace fxwrap {

class ResizeStep;

// State of one unit that several steps use: regions, which are emptied after an error, and whether steps skip autograd.
struct Shared {
  std::vector<ResizeStep*> regions;
  std::optional<at::AutoDispatchBelowAutograd> below_autograd;
};

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Slots& slots) = 0;
  // Called when a unit takes the step.
  virtual void join(Shared&) {}
  // Needed: it holds the interpreter's lock. InTheWay: it works long, and the lock is released. Either: it stays as it is.
  enum class Lock { Needed, InTheWay, Either };
  virtual Lock lock() const { return Lock::Either; }
  // For Python's garbage collection: every object of Python's that it refers to, except those in slots.
  virtual int traverse(visitproc, void*) const { return 0; }
};

// -- kernels ----------------------------------------------------------------------------------------------

constexpr size_t kMostArguments = 96;

// Every argument is a pointer or an integer of 64 bits. The calling conventions of 64-bit processors pass both alike.
template <size_t... I>
void call_with(void* function, const uint64_t* arguments, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype((void)I, uint64_t{})...)>(function)(arguments[I]...);
}
template <size_t N>
void call_n(void* function, const uint64_t* arguments) {
  call_with(function, arguments, std::make_index_sequence<N>{});
}
using Caller = void (*)(void*, const uint64_t*);
template <size_t... N>
constexpr std::array<Caller, sizeof...(N)> callers(std::index_sequence<N...>) {
  return {call_n<N>...};
}
constexpr auto kCallers = callers(std::make_index_sequence<kMostArguments + 1>{});

class KernelStep : public Step {
 public:
  Lock lock() const override { return Lock::InTheWay; }
  // owner: keeps what is at the address
  // read, written: the positions of tensors; the other arguments are numbers
  KernelStep(uint64_t address, py::object owner, const Value::Parts& arguments, const std::vector<size_t>& read,
             const std::vector<size_t>& written)
      : function_(reinterpret_cast<void*>(address)), owner_(std::move(owner)) {
    TORCH_CHECK(arguments.size() <= kMostArguments);
    caller_ = kCallers[arguments.size()];
    values_.resize(arguments.size());
    std::vector<bool> is_tensor(arguments.size());
    for (auto i : read) pointers_.push_back({i, Operand(arguments.at(i)), false});
    for (auto i : written) pointers_.push_back({i, Operand(arguments.at(i)), true});
    for (const auto& pointer : pointers_) is_tensor[pointer.position] = true;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_tensor[i]) continue;
      if (arguments[i].is_slot())
        numbers_.emplace_back(i, Number(arguments[i]));
      else
        values_[i] = static_cast<uint64_t>(Number(arguments[i]).in(kNoSlots));
    }
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(owner_.ptr());
    return 0;
  }

  void run(Slots& slots) override {
    for (const auto& pointer : pointers_) {
      const auto& tensor = pointer.operand.in(slots);
      const auto* data = pointer.written ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
      values_[pointer.position] = reinterpret_cast<uint64_t>(data);
    }
    for (const auto& [position, number] : numbers_) values_[position] = static_cast<uint64_t>(number.in(slots));
    caller_(function_, values_.data());
  }

 private:
  struct Pointer {
    size_t position;
    Operand operand;
    bool written;
  };
  void* function_;
  py::object owner_;
  Caller caller_;
  std::vector<uint64_t> values_;
  std::vector<Pointer> pointers_;
  std::vector<std::pair<size_t, Number>> numbers_;
};

// -- operators --------------------------------------------------------------------------------------------

class OperatorStep : public Step {
 public:
  // An argument that is not there has its default; a result that is not there is dropped.
  OperatorStep(const std::string& name, const std::string& overload, const std::vector<std::optional<Value>>& arguments,
               const std::vector<std::optional<size_t>>& results)
      : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())) {
    const auto& schema = operator_.schema();
    TORCH_CHECK(arguments.size() == schema.arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& declared = schema.arguments()[i];
      if (!arguments[i]) {
        TORCH_CHECK(declared.default_value().has_value());
        values_.push_back(*declared.default_value());
        continue;
      }
      const auto& value = *arguments[i];
      if (value.is_constant()) {
        values_.push_back(converted(value.make(), declared.type()));
        continue;
      }
      values_.emplace_back();
      auto type = declared.type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (value.is_slot() && (type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::IntType))
        slot_arguments_.push_back({i, value.slot(), std::move(type)});
      else
        python_arguments_.push_back({i, value, declared.type()});
    }
    for (auto result : results) results_.push_back(result ? static_cast<long>(*result) : -1);
    TORCH_CHECK(results_.empty() || results_.size() == schema.returns().size());
    stack_.reserve(std::max(values_.size(), schema.returns().size()));
  }

  Lock lock() const override { return python_arguments_.empty() ? Lock::InTheWay : Lock::Needed; }
  int traverse(visitproc visit, void* arg) const override {
    for (const auto& argument : python_arguments_)
      if (auto stop = argument.value.traverse(visit, arg)) return stop;
    return 0;
  }

  static c10::IValue converted(const py::object& value, const c10::TypePtr& type) {
    const bool number = PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) ||
                        PyComplex_Check(value.ptr());
    if (type->kind() != c10::TypeKind::TensorType || !number) return torch::jit::toIValue(value, type);
    return wrapped(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
  }

  // A number where a tensor is declared is a wrapped number: type promotion treats it as in torch's own functions.
  static at::Tensor wrapped(const at::Scalar& number) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto tensor = at::scalar_to_tensor(number);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  static c10::IValue in_slot(const Slot& slot, const c10::TypePtr& type) {
    const bool tensor = type->kind() == c10::TypeKind::TensorType;
    switch (slot.kind) {
      case Slot::Kind::Tensor:
        return slot.tensor;
      case Slot::Kind::Integer:
        return tensor ? c10::IValue(wrapped(slot.number)) : c10::IValue(slot.number);
      case Slot::Kind::Boolean:
        return tensor ? c10::IValue(wrapped(slot.number != 0)) : c10::IValue(slot.number);
      case Slot::Kind::Object: {
        py::gil_scoped_acquire locked;
        return converted(slot.object, type);
      }
      case Slot::Kind::Nothing:
        break;
    }
    return {};  // None, where a tensor is optional
  }

  void run(Slots& slots) override {
    struct Emptied {  // also on errors: nothing is kept between calls
      std::vector<c10::IValue>& stack;
      ~Emptied() { stack.clear(); }
    } emptied{stack_};
    stack_.assign(values_.begin(), values_.end());
    for (const auto& [position, slot, type] : slot_arguments_) stack_[position] = in_slot(slots[slot], type);
    for (const auto& [position, value, type] : python_arguments_)
      stack_[position] = torch::jit::toIValue(value.make(slots), type);
    {
      std::optional<py::gil_scoped_release> unlocked;  // other threads run, as in Python's own call of an operator
      if (lock() == Lock::Needed) unlocked.emplace();
      operator_.callBoxed(&stack_);
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i] < 0) continue;
      auto& slot = slots[static_cast<size_t>(results_[i])];
      if (stack_[i].isTensor()) {
        slot.set(std::move(stack_[i]).toTensor());
      } else if (stack_[i].isInt()) {
        slot.set(stack_[i].toInt());
      } else {
        py::gil_scoped_acquire locked;
        slot.set(torch::jit::toPyObject(std::move(stack_[i])).ptr());
      }
    }
  }

 private:
  struct SlotArgument {
    size_t position, slot;
    c10::TypePtr type;
  };
  struct PythonArgument {
    size_t position;
    Value value;
    c10::TypePtr type;
  };
  std::vector<c10::IValue> stack_;
  std::vector<SlotArgument> slot_arguments_;
  std::vector<PythonArgument> python_arguments_;

 protected:
  c10::OperatorHandle operator_;
  std::vector<c10::IValue> values_;
  std::vector<long> results_;
};

// -- memory -----------------------------------------------------------------------------------------------

class EmptyStep : public Step {
 public:
  EmptyStep(size_t slot, Sizes size, Sizes stride, at::ScalarType dtype)
      : slot_(slot), size_(std::move(size)), stride_(std::move(stride)), dtype_(dtype) {}
  void run(Slots& slots) override {
    slots[slot_].set(at::detail::empty_strided_cpu(size_.in(slots), stride_.in(slots), dtype_));
  }

 private:
  size_t slot_;
  Sizes size_, stride_;
  at::ScalarType dtype_;
};

class ViewStep : public Step {
 public:
  ViewStep(size_t slot, Operand base, Sizes size, Sizes stride, Number offset)
      : slot_(slot), base_(std::move(base)), size_(std::move(size)), stride_(std::move(stride)), offset_(offset) {}
  void run(Slots& slots) override {
    slots[slot_].set(torch::inductor::_reinterpret_tensor(base_.in(slots), size_.in(slots), stride_.in(slots),
                                                          offset_.in(slots)));
  }

 private:
  size_t slot_;
  Operand base_;
  Sizes size_, stride_;
  Number offset_;
};

// Gives a storage memory, or takes it back.
class ResizeStep : public Step {
 public:
  ResizeStep(c10::Storage storage, size_t bytes) : storage_(std::move(storage)), bytes_(bytes) {}
  void run(Slots&) override { resize(bytes_); }
  void join(Shared& unit) override { unit.regions.push_back(this); }
  void empty() { resize(0); }

 private:
  void resize(size_t bytes) {
    auto* storage = storage_.unsafeGetStorageImpl();
    if (bytes == 0) {
      storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
      storage->set_nbytes(0);
    } else if (storage->nbytes() != bytes) {
      at::native::resize_bytes_cpu(storage, bytes);
    }
  }
  c10::Storage storage_;
  size_t bytes_;
};

// Copies inputs to their static buffers.
class FillStep : public Step {
 public:
  FillStep(std::vector<at::Tensor> buffers, const Value::Parts& inputs) : buffers_(std::move(buffers)) {
    for (const auto& input : inputs) inputs_.emplace_back(input);
    sources_.reserve(inputs_.size());
  }
  Lock lock() const override { return Lock::InTheWay; }
  void run(Slots& slots) override {
    struct Emptied {
      std::vector<at::Tensor>& tensors;
      ~Emptied() { tensors.clear(); }
    } emptied{sources_};
    for (const auto& input : inputs_) sources_.push_back(unexpanded(input.in(slots)));
    at::AutoDispatchBelowAutograd below;
    at::_foreach_copy_(buffers_, sources_);
  }

 private:
  // The tensor with one element along dimensions of stride 0.
  static at::Tensor unexpanded(at::Tensor tensor) {
    for (int64_t i = 0; i < tensor.dim(); ++i)
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) tensor = tensor.narrow(i, 0, 1);
    return tensor;
  }
  std::vector<at::Tensor> buffers_, sources_;
  std::vector<Operand> inputs_;
};

}  // namespace fxwrap
