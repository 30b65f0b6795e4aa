// Steps that call Python, or leave to Python what they cannot do; and those that move what is in slots.

#pragma once

#include <functional>

#include "steps.h"

namespace fxwrap {

// -- Python -----------------------------------------------------------------------------------------------

class PythonStep : public Step {
 public:
  // The last arguments have names.
  PythonStep(py::object function, Value::Parts arguments, const py::tuple& names, Results results, bool unpacks)
      : function_(std::move(function)), unpacks_(unpacks), values_(std::move(arguments)), results_(std::move(results)) {
    if (!names.empty()) names_ = names;
    held_.resize(values_.size());
    given_.resize(values_.size());
  }

  Lock lock() const override { return Lock::Needed; }
  const char* note() const override { return "Python"; }

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
      if (!results_.empty()) slots[*results_[0]].set(result.ptr());
      return;
    }
    auto parts = owned(PySequence_Fast(result.ptr(), "a partition returns a sequence"));
    if (static_cast<size_t>(PySequence_Fast_GET_SIZE(parts.ptr())) != results_.size())
      throw py::value_error("a partition returned " + std::to_string(PySequence_Fast_GET_SIZE(parts.ptr())) +
                            " values, and has " + std::to_string(results_.size()) + " outputs");
    for (size_t i = 0; i < results_.size(); ++i)
      if (results_[i]) slots[*results_[i]].set(PySequence_Fast_GET_ITEM(parts.ptr(), static_cast<Py_ssize_t>(i)));
  }

 private:
  py::object function_;
  bool unpacks_;
  Value::Parts values_;
  py::tuple names_ = py::reinterpret_steal<py::tuple>(nullptr);
  Results results_;
  std::vector<py::object> held_;
  std::vector<PyObject*> given_;
};

// A step as Python has it, until a unit takes it.
struct MadeStep {
  std::unique_ptr<Step> step;
};

// What a step can do natively as a rule; Python does the rest, or says what is wrong.
class OrPythonStep : public Step {
 public:
  explicit OrPythonStep(MadeStep& python) {
    TORCH_CHECK(dynamic_cast<PythonStep*>(python.step.get()) != nullptr, "this is no call of Python");
    python_ = std::move(python.step);
  }
  int traverse(visitproc visit, void* arg) const override { return python_->traverse(visit, arg); }
  void run(Slots& slots) final {
    if (natively(slots)) return;
    py::gil_scoped_acquire locked;
    try {
      python_->run(slots);
    } catch (python_error& error) {
      error.persist();  // it may reach the caller on another thread
      throw;
    }
  }

 private:
  virtual bool natively(Slots& slots) = 0;
  std::unique_ptr<Step> python_;
};

class LayoutStep : public OrPythonStep {
 public:
  LayoutStep(const Value& args, MadeStep& say)
      : OrPythonStep(say), operand_(args.parts().at(0)), size_(args.parts().at(1)), stride_(args.parts().at(2)) {}

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
  AlignmentStep(const Value& args, MadeStep& say)
      : OrPythonStep(say), operand_(args.parts().at(0)), bytes_(static_cast<uint64_t>(Number(args.parts().at(1)).in())) {}

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
  ConditionStep(const Value& args, MadeStep& say) : OrPythonStep(say), condition_(args.parts().at(0)) {}

 private:
  bool natively(Slots& slots) override { return condition_.there(slots) && condition_.in(slots) != 0; }
  Number condition_;
};

// Arithmetic of sizes. What does not fit in 64 bits, and other numbers than integers, are Python's.
class ArithmeticStep : public OrPythonStep {
 public:
  ArithmeticStep(const Results& results, const py::object& function, const Value& args, MadeStep& python)
      : OrPythonStep(python),
        slot_(only(results)),
        compute_(function_of(function, args.parts().size())),
        first_(args.parts().front()),
        second_(args.parts().back()) {}

 private:
  // False where Python has to compute. One that takes one operand gets it twice.
  using Function = bool (*)(int64_t, int64_t, Slot&);

  static Function function_of(const py::object& python, size_t operands) {
    struct Operation {
      const char *module, *name;
      size_t operands;
      Function function;
    };
    static constexpr Operation kOperations[] = {
        {"operator", "add", 2, add},
        {"operator", "sub", 2, subtract},
        {"operator", "mul", 2, multiply},
        {"operator", "floordiv", 2, divide},
        {"operator", "mod", 2, modulo},
        {"operator", "neg", 1, negate},
        {"operator", "ge", 2, compare<std::greater_equal<>>},
        {"operator", "le", 2, compare<std::less_equal<>>},
        {"operator", "gt", 2, compare<std::greater<>>},
        {"operator", "lt", 2, compare<std::less<>>},
        {"operator", "eq", 2, compare<std::equal_to<>>},
        {"operator", "ne", 2, compare<std::not_equal_to<>>},
        {"builtins", "abs", 1, absolute},
        {"builtins", "max", 2, larger},
        {"builtins", "min", 2, smaller},
    };
    for (const auto& one : kOperations)
      if (one.operands == operands && py::object(py::module_::import(one.module).attr(one.name)).is(python)) return one.function;
    throw NotNative();
  }

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
  ItemStep(const Results& results, Value whole, const Value& position)
      : slot_(only(results)), whole_(std::move(whole)), position_(Number(position).in()) {}
  Lock lock() const override { return Lock::Needed; }
  void run(Slots& slots) override {
    slots[slot_].set(owned(PySequence_GetItem(whole_.make(slots).ptr(), position_)).ptr());
  }

 private:
  size_t slot_;
  Value whole_;
  int64_t position_;
};

class SetStep : public Step {
 public:
  SetStep(size_t slot, Value value) : slot_(slot), value_(std::move(value)) {}
  int traverse(visitproc visit, void* arg) const override { return value_.traverse(visit, arg); }
  Lock lock() const override { return Lock::Needed; }
  void run(Slots& slots) override {
    if (value_.is_slot())
      slots[slot_] = slots[value_.slot()];
    else
      slots[slot_].set(value_.make(slots).ptr());
  }

 private:
  size_t slot_;
  Value value_;
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
