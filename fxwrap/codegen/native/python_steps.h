// Steps that call Python, or leave to Python what they cannot do; and those that move what is in slots.

#pragma once

#include <functional>

#include "steps.h"

namespace fxwrap {

// -- Python -----------------------------------------------------------------------------------------------

class PythonStep : public Step {
 public:
  // The last arguments have names.
  PythonStep(py::object function, Value::Parts arguments, const py::tuple& names, std::vector<size_t> results,
             bool unpacks)
      : function_(std::move(function)), unpacks_(unpacks), values_(std::move(arguments)), results_(std::move(results)) {
    if (!names.empty()) names_ = names;
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
  Value::Parts values_;
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

class ConditionStep : public OrPythonStep {
 public:
  ConditionStep(Number condition, std::unique_ptr<PythonStep> say) : OrPythonStep(std::move(say)), condition_(condition) {}

 private:
  bool natively(Slots& slots) override { return condition_.there(slots) && condition_.in(slots) != 0; }
  Number condition_;
};

// Arithmetic of sizes. What does not fit in 64 bits, and other numbers than integers, are Python's.
class ArithmeticStep : public OrPythonStep {
 public:
  ArithmeticStep(size_t slot, size_t operation, Number first, Number second, std::unique_ptr<PythonStep> python)
      : OrPythonStep(std::move(python)),
        slot_(slot),
        compute_(operations().at(operation).function),
        first_(first),
        second_(second) {}

  // False where Python has to compute.
  using Function = bool (*)(int64_t, int64_t, Slot&);
  struct Operation {
    const char* name;  // in fxwrap/host_graph/arithmetic.py
    size_t operands;
    Function function;
  };
  static const std::vector<Operation>& operations() {
    static const std::vector<Operation> all = {
        {"operator.add", 2, add},
        {"operator.sub", 2, subtract},
        {"operator.mul", 2, multiply},
        {"operator.floordiv", 2, divide},
        {"operator.mod", 2, modulo},
        {"operator.neg", 1, negate},
        {"operator.ge", 2, compare<std::greater_equal<>>},
        {"operator.le", 2, compare<std::less_equal<>>},
        {"operator.gt", 2, compare<std::greater<>>},
        {"operator.lt", 2, compare<std::less<>>},
        {"operator.eq", 2, compare<std::equal_to<>>},
        {"operator.ne", 2, compare<std::not_equal_to<>>},
        {"builtins.abs", 1, absolute},
        {"builtins.max", 2, larger},
        {"builtins.min", 2, smaller},
    };
    return all;
  }

 private:
  bool natively(Slots& slots) override {
    return first_.there(slots) && second_.there(slots) &&
           compute_(first_.in(slots), second_.in(slots), slots[slot_]);
  }

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

  size_t slot_;
  Function compute_;
  Number first_, second_;
};

// -- slots ------------------------------------------------------------------------------------------------

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
  explicit BelowAutogradStep(bool below) : below_(below) {}
  void join(Shared& unit) override { state_ = &unit.below_autograd; }
  void run(Slots&) override {
    if (below_)
      state_->emplace();
    else
      state_->reset();
  }

 private:
  std::optional<at::AutoDispatchBelowAutograd>* state_ = nullptr;
  bool below_;
};

}  // namespace fxwrap
