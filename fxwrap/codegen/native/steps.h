// The kinds of steps that a unit has.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <torch/csrc/inductor/inductor_ops.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>

#include "values.h"

namespace fxwrap {

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Slots& slots) = 0;
  // Whether it needs the interpreter's lock, works so long that others should have it, or neither.
  enum class Lock { Needed, InTheWay, Either };
  virtual Lock lock() const { return Lock::Either; }
  // For Python's garbage collection: every object of Python's that it refers to, slots aside.
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
  // arguments: (what, value): "read" and "written" tensors, and numbers
  KernelStep(uint64_t address, const py::list& arguments) : function_(reinterpret_cast<void*>(address)) {
    TORCH_CHECK(arguments.size() <= kMostArguments);
    caller_ = kCallers[arguments.size()];
    values_.resize(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto argument = py::cast<py::tuple>(arguments[i]);
      auto what = py::cast<std::string>(argument[0]);
      Value value(argument[1]);
      if (what != "number")
        pointers_.push_back({i, Operand(value), what == "written"});
      else if (value.is_slot())
        numbers_.emplace_back(i, Number(value));
      else
        values_[i] = static_cast<uint64_t>(Number(value).in(kNoSlots));
    }
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
  Caller caller_;
  std::vector<uint64_t> values_;
  std::vector<Pointer> pointers_;
  std::vector<std::pair<size_t, Number>> numbers_;
};

// -- operators --------------------------------------------------------------------------------------------

class OperatorStep : public Step {
 public:
  OperatorStep(const std::string& name, const std::string& overload, const py::list& arguments, const py::list& results)
      : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())) {
    const auto& schema = operator_.schema();
    TORCH_CHECK(arguments.size() == schema.arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& declared = schema.arguments()[i];
      if (arguments[i].is_none()) {  // left out
        TORCH_CHECK(declared.default_value().has_value());
        values_.push_back(*declared.default_value());
        continue;
      }
      Value value(arguments[i]);
      if (value.is_constant()) {
        values_.push_back(converted(value.make(), declared.type()));
        continue;
      }
      values_.emplace_back();
      auto type = declared.type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (value.is_slot() && (type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::IntType))
        holes_.push_back({i, value.slot(), std::move(type)});
      else
        others_.push_back({i, std::move(value), declared.type()});
    }
    for (auto result : results) results_.push_back(result.is_none() ? -1 : py::cast<long>(result));
    TORCH_CHECK(results_.empty() || results_.size() == schema.returns().size());
    stack_.reserve(std::max(values_.size(), schema.returns().size()));
  }

  Lock lock() const override { return others_.empty() ? Lock::InTheWay : Lock::Needed; }
  int traverse(visitproc visit, void* arg) const override {
    for (const auto& other : others_)
      if (auto stop = other.value.traverse(visit, arg)) return stop;
    return 0;
  }

  static c10::IValue converted(const py::object& value, const c10::TypePtr& type) {
    const bool number = PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) ||
                        PyComplex_Check(value.ptr());
    if (type->kind() != c10::TypeKind::TensorType || !number) return torch::jit::toIValue(value, type);
    return wrapped(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
  }

  // A number where a tensor is declared takes the other operand's dtype, as in torch's own functions.
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
    for (const auto& [position, slot, type] : holes_) stack_[position] = in_slot(slots[slot], type);
    for (const auto& [position, value, type] : others_)
      stack_[position] = torch::jit::toIValue(value.make(slots), type);
    {
      std::optional<py::gil_scoped_release> others;  // may run, as in Python's own call of an operator
      if (lock() == Lock::Needed) others.emplace();
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
  struct Hole {
    size_t position, slot;
    c10::TypePtr type;
  };
  struct Other {
    size_t position;
    Value value;
    c10::TypePtr type;
  };
  c10::OperatorHandle operator_;
  std::vector<c10::IValue> values_, stack_;
  std::vector<Hole> holes_;
  std::vector<Other> others_;
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
  FillStep(const py::list& buffers, const py::list& inputs) {
    for (auto buffer : buffers) buffers_.push_back(THPVariable_Unpack(buffer.ptr()));
    for (auto input : inputs) inputs_.emplace_back(Value(input));
    sources_.reserve(inputs_.size());
  }
  Lock lock() const override { return Lock::InTheWay; }
  void run(Slots& slots) override {
    struct Emptied {
      std::vector<at::Tensor>& tensors;
      ~Emptied() { tensors.clear(); }
    } emptied{sources_};
    sources_.clear();  // a fork may have left some
    for (const auto& input : inputs_) sources_.push_back(unexpanded(input.in(slots)));
    at::AutoDispatchBelowAutograd below;
    at::_foreach_copy_(buffers_, sources_);
  }

 private:
  // One element along dimensions that repeat it.
  static at::Tensor unexpanded(at::Tensor tensor) {
    for (int64_t i = 0; i < tensor.dim(); ++i)
      if (tensor.stride(i) == 0 && tensor.size(i) > 1) tensor = tensor.narrow(i, 0, 1);
    return tensor;
  }
  std::vector<at::Tensor> buffers_, sources_;
  std::vector<Operand> inputs_;
};

// -- Python -----------------------------------------------------------------------------------------------

class PythonStep : public Step {
 public:
  PythonStep(py::object function, const py::list& arguments, const py::dict& named, const py::list& results, bool unpacks)
      : function_(std::move(function)), unpacks_(unpacks) {
    for (auto argument : arguments) values_.emplace_back(argument);
    if (!named.empty()) names_ = py::tuple(named.size());
    size_t position = 0;
    for (auto item : named) {
      values_.emplace_back(item.second);
      names_[position++] = item.first;
    }
    for (auto result : results) results_.push_back(py::cast<size_t>(result));
    held_.resize(values_.size());
    given_.resize(values_.size());
  }

  Lock lock() const override { return Lock::Needed; }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(function_.ptr());
    Py_VISIT(names_.ptr());
    for (const auto& value : values_)
      if (auto stop = value.traverse(visit, arg)) return stop;
    return 0;
  }

  void run(Slots& slots) override {
    for (size_t i = 0; i < values_.size(); ++i) {
      held_[i] = values_[i].make(slots);
      given_[i] = held_[i].ptr();
    }
    const auto named = names_ ? names_.size() : 0;
    auto* returned = PyObject_Vectorcall(function_.ptr(), given_.data(), values_.size() - named, names_.ptr());
    for (auto& argument : held_) argument = py::object();
    auto result = owned(returned);
    if (!unpacks_) {
      if (!results_.empty()) slots[results_[0]].set(result.ptr());
      return;
    }
    auto parts = owned(PySequence_Fast(result.ptr(), "a partition returns a sequence"));
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(parts.ptr())) != results_.size())
      throw py::value_error("a partition returned " + std::to_string(PySequence_Fast_GET_SIZE(parts.ptr())) +
                            " values, and has " + std::to_string(results_.size()) + " outputs");
    for (size_t i = 0; i < results_.size(); ++i)
      slots[results_[i]].set(PySequence_Fast_GET_ITEM(parts.ptr(), static_cast<Py_ssize_t>(i)));
  }

 private:
  py::object function_;
  bool unpacks_;
  std::vector<Value> values_;
  py::tuple names_ = py::reinterpret_steal<py::tuple>(nullptr);
  std::vector<size_t> results_;
  std::vector<py::object> held_;
  std::vector<PyObject*> given_;
};

// What a step can do natively as a rule; Python does the rest, or says what is wrong.
class OrPythonStep : public Step {
 public:
  explicit OrPythonStep(std::unique_ptr<PythonStep> python) : python_(std::move(python)) {}
  int traverse(visitproc visit, void* arg) const override { return python_->traverse(visit, arg); }
  void run(Slots& slots) final {
    if (natively(slots)) return;
    py::gil_scoped_acquire locked;
    python_->run(slots);
  }

 private:
  virtual bool natively(Slots& slots) = 0;
  std::unique_ptr<PythonStep> python_;
};

class LayoutStep : public OrPythonStep {
 public:
  LayoutStep(Operand operand, Sizes size, Sizes stride, std::unique_ptr<PythonStep> say)
      : OrPythonStep(std::move(say)), operand_(std::move(operand)), size_(std::move(size)), stride_(std::move(stride)) {}

 private:
  bool natively(Slots& slots) override {
    const auto& tensor = operand_.in(slots);
    return tensor.defined() && tensor.sizes() == size_.in(slots) && tensor.strides() == stride_.in(slots);
  }
  Operand operand_;
  Sizes size_, stride_;
};

class AlignmentStep : public OrPythonStep {
 public:
  AlignmentStep(Operand operand, uint64_t bytes, std::unique_ptr<PythonStep> say)
      : OrPythonStep(std::move(say)), operand_(std::move(operand)), bytes_(bytes) {}

 private:
  bool natively(Slots& slots) override {
    const auto& tensor = operand_.in(slots);
    return tensor.defined() && tensor.has_storage() &&
           reinterpret_cast<uint64_t>(tensor.const_data_ptr()) % bytes_ == 0;
  }
  Operand operand_;
  uint64_t bytes_;
};

class CheckStep : public OrPythonStep {
 public:
  CheckStep(Number condition, std::unique_ptr<PythonStep> say) : OrPythonStep(std::move(say)), condition_(condition) {}

 private:
  bool natively(Slots& slots) override { return condition_.there(slots) && condition_.in(slots) != 0; }
  Number condition_;
};

// Arithmetic of sizes. What does not fit in 64 bits, and other numbers than integers, are Python's.
class IntegerStep : public OrPythonStep {
 public:
  IntegerStep(size_t slot, const std::string& operation, Number first, Number second, std::unique_ptr<PythonStep> python)
      : OrPythonStep(std::move(python)), slot_(slot), compute_(function(operation)), first_(first), second_(second) {}

 private:
  bool natively(Slots& slots) override {
    return first_.there(slots) && second_.there(slots) &&
           compute_(first_.in(slots), second_.in(slots), slots[slot_]);
  }

  // False where Python has to compute.
  using Function = bool (*)(int64_t, int64_t, Slot&);

  template <typename Compare>
  static bool compare(int64_t a, int64_t b, Slot& slot) {
    slot.set(Compare()(a, b), true);
    return true;
  }
  static bool add(int64_t a, int64_t b, Slot& slot) {
    int64_t sum = 0;
    return !__builtin_add_overflow(a, b, &sum) && stored(sum, slot);
  }
  static bool subtract(int64_t a, int64_t b, Slot& slot) {
    int64_t difference = 0;
    return !__builtin_sub_overflow(a, b, &difference) && stored(difference, slot);
  }
  static bool multiply(int64_t a, int64_t b, Slot& slot) {
    int64_t product = 0;
    return !__builtin_mul_overflow(a, b, &product) && stored(product, slot);
  }
  // C rounds towards zero, and Python down.
  static bool divide(int64_t a, int64_t b, Slot& slot) { return a >= 0 && b > 0 && stored(a / b, slot); }
  static bool modulo(int64_t a, int64_t b, Slot& slot) { return a >= 0 && b > 0 && stored(a % b, slot); }
  static bool larger(int64_t a, int64_t b, Slot& slot) { return stored(std::max(a, b), slot); }
  static bool smaller(int64_t a, int64_t b, Slot& slot) { return stored(std::min(a, b), slot); }
  // Of one operand: the second repeats it.
  static bool negate(int64_t a, int64_t, Slot& slot) { return subtract(0, a, slot); }
  static bool absolute(int64_t a, int64_t, Slot& slot) { return a < 0 ? negate(a, a, slot) : stored(a, slot); }
  static bool stored(int64_t value, Slot& slot) {
    slot.set(value);
    return true;
  }

  static Function function(const std::string& operation) {
    static const std::unordered_map<std::string, Function> known = {
        {"add", add},
        {"sub", subtract},
        {"mul", multiply},
        {"floordiv", divide},
        {"mod", modulo},
        {"max", larger},
        {"min", smaller},
        {"neg", negate},
        {"abs", absolute},
        {"ge", compare<std::greater_equal<>>},
        {"le", compare<std::less_equal<>>},
        {"gt", compare<std::greater<>>},
        {"lt", compare<std::less<>>},
        {"eq", compare<std::equal_to<>>},
        {"ne", compare<std::not_equal_to<>>},
    };
    return known.at(operation);
  }

  size_t slot_;
  Function compute_;
  Number first_, second_;
};

class ItemStep : public Step {
 public:
  ItemStep(size_t slot, size_t of, Py_ssize_t position) : slot_(slot), of_(of), position_(position) {}
  Lock lock() const override { return Lock::Needed; }
  void run(Slots& slots) override {
    auto whole = owned(slots[of_].get());
    slots[slot_].set(owned(PySequence_GetItem(whole.ptr(), position_)).ptr());
  }

 private:
  size_t slot_, of_;
  Py_ssize_t position_;
};

class SetStep : public Step {
 public:
  SetStep(size_t slot, Value value) : slot_(slot), value_(std::move(value)) {}
  int traverse(visitproc visit, void* arg) const override { return value_.traverse(visit, arg); }
  Lock lock() const override { return Lock::Needed; }
  void run(Slots& slots) override { slots[slot_].set(value_.make(slots).ptr()); }

 private:
  size_t slot_;
  Value value_;
};

class CopyStep : public Step {
 public:
  CopyStep(size_t slot, size_t from) : slot_(slot), from_(from) {}
  Lock lock() const override { return Lock::Needed; }
  void run(Slots& slots) override { slots[slot_] = slots[from_]; }

 private:
  size_t slot_, from_;
};

class DropStep : public Step {
 public:
  explicit DropStep(size_t slot) : slot_(slot) {}
  void run(Slots& slots) override { slots[slot_].clear(); }

 private:
  size_t slot_;
};

// Skips autograd's layer of the dispatcher from here on, or does so no more.
class BelowAutogradStep : public Step {
 public:
  explicit BelowAutogradStep(std::shared_ptr<std::optional<at::AutoDispatchBelowAutograd>> state, bool below)
      : state_(std::move(state)), below_(below) {}
  void run(Slots&) override {
    if (below_)
      state_->emplace();
    else
      state_->reset();
  }

 private:
  std::shared_ptr<std::optional<at::AutoDispatchBelowAutograd>> state_;
  bool below_;
};

}  // namespace fxwrap
