// Steps that consist of steps: branches and loops.

#pragma once

#include <ATen/Functions.h>
#include <time.h>

#include "python_steps.h"

namespace fxwrap {

// Copies a slot; with the interpreter's lock, if an object of Python's is in it.
inline void copy(const Slot& from, Slot& to) {
  to.clear();
  std::optional<py::gil_scoped_acquire> locked;
  if (from.kind == Slot::Kind::Object) locked.emplace();
  to = from;
}

inline void move(Slot& from, Slot& to) {
  to.clear();
  to = std::move(from);
  from.kind = Slot::Kind::Nothing;
}

// Moves values to other slots, all at once.
class MoveStep : public Step {
 public:
  MoveStep(const Results& results, const Value& values, const Value& ended) {
    if (values.parts().size() != results.size()) throw NotNative();
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& value = values.parts()[i];
      if (!value.is_slot() && !value.is_constant()) throw NotNative();
      if (!results[i] || (value.is_slot() && value.slot() == *results[i])) continue;  // it stays where it is
      results_.push_back(*results[i]);
      known_.emplace_back();
      sources_.push_back(value.is_slot() ? std::optional(value.slot()) : std::nullopt);
      if (!value.is_slot()) known_.back().set(value.make().ptr());
    }
    for (const auto& local : ended.parts()) ended_.push_back(local.slot());
    moved_.resize(results_.size());
  }
  int traverse(visitproc visit, void* arg) const override {
    for (const auto& slot : known_) Py_VISIT(slot.object.ptr());
    return 0;
  }
  void run(Slots& slots) override {
    for (size_t i = 0; i < results_.size(); ++i) copy(sources_[i] ? slots[*sources_[i]] : known_[i], moved_[i]);
    for (auto slot : ended_) slots[slot].clear();
    for (size_t i = 0; i < results_.size(); ++i) move(moved_[i], slots[results_[i]]);
  }

 private:
  std::vector<size_t> results_;
  std::vector<std::optional<size_t>> sources_;
  std::vector<Slot> known_, moved_;
  std::vector<size_t> ended_;
};

// A number, or a tensor with one element.
class Single {
 public:
  explicit Single(const Value& value) : value_(value) {
    if (value.is_slot()) slot_ = value.slot();
    else if (value.is_constant()) known_.set(value.make().ptr());
    else throw NotNative();
  }
  int traverse(visitproc visit, void* arg) const { return value_.traverse(visit, arg); }
  bool is_true(const Slots& slots) const {
    return read<bool>(slots, [](const at::Scalar& scalar) { return scalar.toBool(); }, PyObject_IsTrue);
  }
  int64_t integer(const Slots& slots) const {
    return read<int64_t>(slots, [](const at::Scalar& scalar) { return scalar.toLong(); }, [](PyObject* object) {
      return PyLong_AsLongLong(owned(PyNumber_Long(object)).ptr());
    });
  }

 private:
  template <typename T, typename OfScalar, typename OfObject>
  T read(const Slots& slots, OfScalar of_scalar, OfObject of_object) const {
    const auto& slot = slot_ ? slots[*slot_] : known_;
    if (slot.is_number()) return static_cast<T>(slot.number);
    if (slot.kind == Slot::Kind::Tensor) {
      const auto& tensor = slot.tensor;
      const bool one = tensor.numel() == 1;
      if (one && tensor.is_cpu() && tensor.scalar_type() == at::kBool) return static_cast<T>(*tensor.const_data_ptr<bool>());
      if (one && tensor.is_cpu() && tensor.scalar_type() == at::kLong) return static_cast<T>(*tensor.const_data_ptr<int64_t>());
      const bool converts = std::is_same_v<T, bool> || !at::isFloatingType(tensor.scalar_type());
      if (one && converts) return of_scalar(tensor.item());
    }
    // Python says what is wrong with others.
    py::gil_scoped_acquire locked;
    const auto object = owned(slot.get());
    const auto found = of_object(object.ptr());
    if (PyErr_Occurred() != nullptr) throw python_error();
    return static_cast<T>(found);
  }
  Value value_;
  std::optional<size_t> slot_;
  Slot known_;
};

// The steps of a branch or of a loop's body.
class Block {
 public:
  explicit Block(const std::vector<MadeStep*>& made) {
    for (auto* one : made) {
      TORCH_CHECK(one->step, "another unit has this step");
      needs_python_ = needs_python_ || one->step->lock() == Step::Lock::Needed;
      steps_.push_back(std::move(one->step));
    }
  }
  bool needs_python() const { return needs_python_; }
  // With a lock that the thread has, which the steps may let go of; without one if none needs it.
  void run(Slots& slots, std::optional<InterpreterLock>& lock) {
    for (const auto& step : steps_) {
      if (lock) follow(step->lock(), *lock);
      if (C10_LIKELY(!unit_->profiled))
        step->run(slots);
      else
        in_range(*step, [&] { step->run(slots); });
    }
  }
  void join(Shared& unit) {
    unit_ = &unit;
    for (const auto& step : steps_) step->join(unit);
  }
  int traverse(visitproc visit, void* arg) const {
    for (const auto& step : steps_)
      if (auto stop = step->traverse(visit, arg)) return stop;
    return 0;
  }

 private:
  std::vector<std::unique_ptr<Step>> steps_;
  const Shared* unit_ = nullptr;
  bool needs_python_ = false;
};
using Blocks = std::vector<std::vector<MadeStep*>>;

class NestedStep : public Step {
 public:
  explicit NestedStep(const Blocks& blocks) : blocks_(blocks.begin(), blocks.end()) {
    for (const auto& block : blocks_) needs_python_ = needs_python_ || block.needs_python();
  }
  Lock lock() const override { return needs_python_ ? Lock::Needed : Lock::InTheWay; }
  void join(Shared& unit) override {
    for (auto& block : blocks_) block.join(unit);
  }
  int traverse(visitproc visit, void* arg) const override {
    for (const auto& block : blocks_)
      if (auto stop = block.traverse(visit, arg)) return stop;
    return 0;
  }

 protected:
  std::optional<InterpreterLock> entered() const {
    return needs_python_ ? std::optional<InterpreterLock>(std::in_place) : std::nullopt;
  }
  std::vector<Block> blocks_;
  bool needs_python_ = false;
};

class BranchStep : public NestedStep {
 public:
  BranchStep(const Value& selector, const Blocks& branches, const Value& by_truth)
      : NestedStep(branches), selector_(selector), by_truth_(py::cast<bool>(by_truth.make())) {}
  int traverse(visitproc visit, void* arg) const override {
    if (auto stop = selector_.traverse(visit, arg)) return stop;
    return NestedStep::traverse(visit, arg);
  }
  void run(Slots& slots) override {
    auto lock = entered();
    const auto count = static_cast<int64_t>(blocks_.size());
    auto position = by_truth_ ? static_cast<int64_t>(selector_.is_true(slots)) : selector_.integer(slots);
    if (position < 0 || position >= count) position = count - 1;  // as ``position_of`` (host_graph/control_flow.py)
    blocks_[static_cast<size_t>(position)].run(slots, lock);
  }

 private:
  Single selector_;
  bool by_truth_;
};

class LoopStep : public NestedStep {
 public:
  LoopStep(Results results, const Value& initial, const Results& carried, const Blocks& blocks, const Value& going,
           const Value& stacks)
      : NestedStep(blocks), results_(std::move(results)), going_(going), stacks_(py::cast<bool>(stacks.make())) {
    for (const auto& slot : carried) carried_.push_back(slot.value());
    begin_ = std::make_unique<MoveStep>(carried, initial, Value(Value::Kind::Tuple, {}));
    if (blocks.size() != 2 || results_.size() > carried_.size()) throw NotNative();
  }
  int traverse(visitproc visit, void* arg) const override {
    if (auto stop = begin_->traverse(visit, arg)) return stop;
    if (auto stop = going_.traverse(visit, arg)) return stop;
    return NestedStep::traverse(visit, arg);
  }

  void run(Slots& slots) override {
    auto lock = entered();
    struct Emptied {  // also on errors
      std::vector<std::vector<at::Tensor>>& passes;
      ~Emptied() { passes.clear(); }
    } emptied{passes_};
    passes_.resize(stacks_ ? carried_.size() : 0);
    begin_->run(slots);
    bool ran = false;
    auto asked = seconds();
    while (true) {
      blocks_[0].run(slots, lock);
      if (!going_.is_true(slots)) break;
      blocks_[1].run(slots, lock);
      for (size_t i = 0; i < passes_.size(); ++i) passes_[i].push_back(tensor(slots[carried_[i]]));
      ran = true;
      if (const auto now = seconds(); now - asked > kPatience) {
        asked = now;
        py::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() != 0) throw python_error();
      }
    }
    for (size_t i = 0; i < results_.size(); ++i)
      if (results_[i]) finish(slots[carried_[i]], slots[*results_[i]], i, ran);
    for (auto slot : carried_) slots[slot].clear();
  }

 private:
  // Between looks for signals, such as Ctrl-C.
  static constexpr double kPatience = 0.05;

  static double seconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  static const at::Tensor& tensor(const Slot& slot) {
    TORCH_CHECK_TYPE(slot.kind == Slot::Kind::Tensor, "fxwrap: a loop stacks what is no tensor");
    return slot.tensor;
  }

  // As ``results_of_loop`` (host_graph/control_flow.py).
  void finish(Slot& carried, Slot& result, size_t position, bool ran) {
    if (stacks_) {
      auto& passes = passes_[position];
      if (passes.empty()) passes.push_back(tensor(carried));
      result.set(at::stack(passes));
    } else if (carried.kind == Slot::Kind::Tensor && !ran) {
      result.set(carried.tensor.clone());
    } else {
      move(carried, result);
    }
  }

  Results results_;
  std::vector<size_t> carried_;
  std::unique_ptr<MoveStep> begin_;
  Single going_;
  bool stacks_;
  std::vector<std::vector<at::Tensor>> passes_;
};

}  // namespace fxwrap
