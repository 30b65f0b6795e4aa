// Steps that call no function of Python: kernels, operators, memory.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/record_function.h>
#include <torch/csrc/inductor/inductor_ops.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "values.h"

namespace fxwrap {

class ResizeStep;

// State of one unit that several steps use: regions, which are emptied after an error, and whether steps skip autograd.
struct Shared {
  std::vector<ResizeStep*> regions;
  std::optional<at::AutoDispatchBelowAutograd> below_autograd;
  bool profiled = false;  // in the present call: steps with a range show in a profile
};

class Step {
 public:
  std::string range;  // in profiles; empty if it has none of its own
  virtual ~Step() = default;
  virtual void run(Slots& slots) = 0;
  // Called when a unit takes the step.
  virtual void join(Shared&) {}
  // Needed: it holds the interpreter's lock. InTheWay: it works long, and the lock is released. Either: it stays as it is.
  enum class Lock { Needed, InTheWay, Either };
  virtual Lock lock() const { return Lock::Either; }
  // Whether it computes the same bits on a thread beside others. Asked of steps in a lane (lanes.h) after they have run.
  enum class Beside { NotKnown, No, Yes };
  virtual Beside beside_others() const { return Beside::Yes; }
  // The line in the listing of what has raised; own: the step's own.
  virtual int64_t failed_line(int64_t own) const { return own; }
  // What a listing says of it.
  virtual const char* note() const { return ""; }
  // For Python's garbage collection: every object of Python's that it refers to, except those in slots.
  virtual int traverse(visitproc, void*) const { return 0; }
};

// Has the thread hold the interpreter's lock, or let go of it, as a step wants it.
inline void follow(Step::Lock wanted, InterpreterLock& lock) {
  if (wanted == Step::Lock::Needed)
    lock.acquire();
  else if (wanted == Step::Lock::InTheWay)
    lock.release();
}

// Runs a step in its range in profiles.
template <typename Run>
void in_range(const Step& step, const Run& run) {
  std::optional<at::RecordFunction> range;
  if (!step.range.empty()) range.emplace(at::RecordScope::USER_SCOPE).before(step.range);
  run();
}

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
  // types: the C types of the arguments
  KernelStep(const Value& address, py::object owner, const Value& arguments, const Value& types)
      : function_(reinterpret_cast<void*>(Number(address).in())), owner_(std::move(owner)) {
    const auto& given = arguments.parts();
    const auto names = py::cast<std::vector<std::string>>(types.make());
    if (names.size() != given.size() || names.size() > kMostArguments) throw NotNative();
    caller_ = kCallers[given.size()];
    values_.resize(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      if (names[i].ends_with('*')) {
        pointers_.push_back({i, Operand(given[i]), !names[i].starts_with("const ")});
        continue;
      }
      if (names[i] != "int64_t" && names[i] != "const int64_t") throw NotNative();
      const Number number(given[i]);
      if (number.known())
        values_[i] = static_cast<uint64_t>(number.in());
      else
        numbers_.emplace_back(i, number);
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
  OperatorStep(Results results, const py::object& overload, const Value& args, const Value& kwargs)
      : operator_(found(overload)), results_(std::move(results)) {
    const auto& schema = operator_.schema();
    if (!results_.empty() && results_.size() != schema.returns().size()) throw NotNative();  // a tuple
    const auto arguments = in_order(args, kwargs);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& declared = schema.arguments()[i];
      if (arguments[i] == nullptr) {
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
      if (!results_[i]) continue;
      auto& slot = slots[*results_[i]];
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

  static c10::OperatorHandle found(const py::object& overload) {
    const auto schema = overload.attr("_schema");
    const auto name = py::cast<std::string>(schema.attr("name"));
    const auto which = py::cast<std::string>(schema.attr("overload_name"));
    return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), which.c_str());
  }

 protected:
  // The arguments as the schema declares them; nullptr: the default.
  std::vector<const Value*> in_order(const Value& args, const Value& kwargs) const {
    std::vector<const Value*> ordered;
    size_t taken = 0;
    for (const auto& declared : operator_.schema().arguments()) {
      const auto* given = !declared.kwarg_only() && taken < args.parts().size() ? &args.parts()[taken] : nullptr;
      for (size_t i = 0; given == nullptr && i < kwargs.parts().size(); ++i)
        if (py::cast<std::string>(kwargs.names()[i]) == declared.name()) given = &kwargs.parts()[i];
      if (given != nullptr)
        ++taken;
      else if (!declared.default_value())
        throw NotNative();
      ordered.push_back(given);
    }
    if (taken != args.parts().size() + kwargs.parts().size()) throw NotNative();
    return ordered;
  }

  c10::OperatorHandle operator_;
  std::vector<c10::IValue> values_;
  Results results_;
};

// Reads an integer out of a tensor with one element.
class NumberStep : public OperatorStep {
 public:
  NumberStep(const Results& results, const py::object& overload, const Value& args, const Value& kwargs)
      : OperatorStep(results, overload, args, kwargs), slot_(only(results)), operand_(args.parts().at(0)) {}
  void run(Slots& slots) override {
    const auto& tensor = operand_.in(slots);
    const bool here = tensor.defined() && tensor.is_cpu() && tensor.numel() == 1;
    if (here && tensor.scalar_type() == at::kLong)
      slots[slot_].set(*tensor.const_data_ptr<int64_t>());
    else if (here && tensor.scalar_type() == at::kInt)
      slots[slot_].set(static_cast<int64_t>(*tensor.const_data_ptr<int32_t>()));
    else
      OperatorStep::run(slots);
  }

 private:
  size_t slot_;
  Operand operand_;
};

// -- memory -----------------------------------------------------------------------------------------------

class EmptyStep : public Step {
 public:
  EmptyStep(const Results& results, const Value& size, const Value& stride, at::ScalarType dtype)
      : slot_(only(results)), size_(size), stride_(stride), dtype_(dtype) {}
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
  ViewStep(const Results& results, const Value& base, const Value& size, const Value& stride, const Value& offset)
      : slot_(only(results)), base_(base), size_(size), stride_(stride), offset_(offset) {}
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
  ResizeStep(c10::Storage storage, const Value& bytes)
      : storage_(std::move(storage)), bytes_(static_cast<size_t>(Number(bytes).in())) {}
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
  FillStep(const Value& buffers, const Value& inputs) : buffers_(py::cast<std::vector<at::Tensor>>(buffers.make())) {
    for (const auto& input : inputs.parts()) inputs_.emplace_back(input);
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
