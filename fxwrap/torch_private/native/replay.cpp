// Replays recordings without Python: a unit is a list of steps over slots, made by graphs/replay/units.py, which calls
// the functions of this module.
//
// A step calls a kernel by its address, an operator through the dispatcher, or a Python function. There is nothing to
// compile for a program: beside what an operator costs, going through a list of steps costs nothing.
//
// Everything here runs with the interpreter's lock but the steps of a unit that need no Python.

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

#include <pthread.h>
#include <unistd.h>

#include "guards.h"
#include "made_steps.h"

namespace fxwrap {
namespace {

struct UnitState {
  Py_ssize_t inputs = 0;
  bool empties_inputs = false;  // at once; else at the end
  Slots slots;
  std::vector<Py_ssize_t> loads;                     // each to the slot of its number
  std::vector<Py_ssize_t> kept_inputs;               // without a slot
  Shared shared;
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<int64_t> lines;  // of the listing, by step
  std::vector<size_t> cleared;  // slots, at the end of a call
  std::optional<Value> result;
  std::string name;                                      // of the range in profiles that a call is
  std::vector<std::pair<size_t, std::string>> ranges;    // inside of it: the first step, up to the next range
  Guards guards;
  py::object kept, give_back, out_of_memory;
  std::vector<bool> may_retry;  // by step: whether it runs again after it was out of memory; empty: none does
  int64_t* counter = nullptr;
  int64_t* clock = nullptr;
  int64_t used = 0;

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(kept.ptr());
    Py_VISIT(give_back.ptr());
    for (const auto& step : steps)
      if (auto stop = step->traverse(visit, arg)) return stop;
    if (auto stop = result->traverse(visit, arg)) return stop;
    return guards.traverse(visit, arg);
  }
};

struct Unit {
  PyObject_HEAD
  vectorcallfunc call;
  UnitState* state;
  int64_t busy;  // the process whose thread is in a call; 0 if none is
  bool ended;
  int64_t failed;  // a line of the listing

  // Whether this process was forked while another thread of the parent was in a call. Nobody knows how far that is: the
  // unit is not called any more, and what is in slots and regions stays as it is, without being freed.
  bool is_abandoned() const { return busy != 0 && busy != process; }

  void drop() {
    auto* dropped = std::exchange(state, nullptr);
    if (!is_abandoned()) delete dropped;
  }
};

PyObject* missed = nullptr;

class Call {
 public:
  Call(Unit* unit, PyObject* inputs)
      : unit_(unit), state_(*unit->state), inputs_(inputs), outer_(std::exchange(innermost_, this)) {
    hold();
    unit_->failed = -1;
    Py_INCREF(unit_);
  }
  ~Call() {
    innermost_ = outer_;
    if (!done_) {
      for (auto& slot : state_.slots) slot.clear();
      for (auto* region : state_.shared.regions) region->empty();
    }
    for (auto slot : state_.cleared) state_.slots[slot].clear();
    if (!state_.empties_inputs) PyList_SetSlice(inputs_, 0, PY_SSIZE_T_MAX, nullptr);
    for (auto* input : kept_) Py_DECREF(input);
    unit_->busy = 0;
    for (const auto& [owners, native] : state_.guards.locks) *native = 0;
    if (unit_->ended) delete std::exchange(unit_->state, nullptr);
    Py_DECREF(unit_);
  }

  py::object run(bool profiled) {
    for (auto position : state_.loads)
      state_.slots[static_cast<size_t>(position)].set(PyList_GET_ITEM(inputs_, position));
    for (auto position : state_.kept_inputs) kept_.push_back(Py_NewRef(PyList_GET_ITEM(inputs_, position)));
    if (state_.empties_inputs && PyList_SetSlice(inputs_, 0, PY_SSIZE_T_MAX, nullptr) != 0) throw python_error();
    size_t at = 0;
    try {
      InterpreterLock lock;
      struct Below {  // wherever the call ends
        std::optional<at::AutoDispatchBelowAutograd>& state;
        ~Below() { state.reset(); }
      } below{state_.shared.below_autograd};
      auto run_until = [&](size_t end) {
        for (; at < end; ++at) {
          auto& step = *state_.steps[at];
          const auto wanted = step.lock();
          follow(wanted, lock);
          const auto run = [&] {
            if (C10_LIKELY(state_.may_retry.empty() || !state_.may_retry[at]))
              step.run(state_.slots);
            else
              run_twice_if_need_be(step, wanted, lock);
          };
          if (C10_LIKELY(!profiled))
            run();
          else
            in_range(step, run);
        }
      };
      state_.shared.profiled = profiled;
      if (C10_UNLIKELY(profiled)) {
        std::optional<at::RecordFunction> range;
        for (const auto& [begin, name] : state_.ranges) {
          run_until(begin);
          range.reset();
          if (!name.empty()) range.emplace(at::RecordScope::USER_SCOPE).before(name);
        }
      }
      run_until(state_.steps.size());
    } catch (...) {
      unit_->failed = state_.steps[at]->failed_line(state_.lines[at]);
      throw;
    }
    auto returned = state_.result->make(state_.slots);
    done_ = true;
    return returned;
  }

  // In a child that was just forked, calls of the thread that did it go on.
  static void forked() {
    for (auto* call = innermost_; call != nullptr; call = call->outer_) call->hold();
  }

 private:
  void hold() {
    unit_->busy = process;
    for (const auto& [owners, native] : state_.guards.locks) *native = process;
  }

  void run_twice_if_need_be(Step& step, Step::Lock wanted, InterpreterLock& lock) {
    try {
      return step.run(state_.slots);
    } catch (...) {
      if (!is_out_of_memory(lock)) throw;
    }
    owned(PyObject_CallNoArgs(state_.give_back.ptr()));
    if (wanted == Step::Lock::InTheWay) lock.release();
    step.run(state_.slots);
  }

  // Whether this is what is being thrown: then it is over, and the interpreter's lock is held.
  bool is_out_of_memory(InterpreterLock& lock) const {
    try {
      throw;
    } catch (const c10::OutOfMemoryError&) {
      lock.acquire();
      return true;
    } catch (python_error& error) {
      lock.acquire();
      error.restore();  // if it is not where Python has it already
      if (PyErr_ExceptionMatches(state_.out_of_memory.ptr()) == 0) return false;
      PyErr_Clear();
      return true;
    } catch (...) {
      return false;
    }
  }

  Unit* unit_;
  UnitState& state_;
  PyObject* inputs_;
  c10::SmallVector<PyObject*, 32> kept_;
  bool done_ = false;
  Call* outer_;  // of this thread
  static thread_local Call* innermost_;
};

thread_local Call* Call::innermost_ = nullptr;

PyObject* replay(Unit* unit, PyObject* inputs) {
  HANDLE_TH_ERRORS
  auto& state = *unit->state;
  py::object returned;
  const bool profiled = !(state.name.empty() && state.ranges.empty()) &&
                        at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
  {
    std::optional<at::RecordFunction> range;
    if (profiled && !state.name.empty())
      range.emplace(at::RecordScope::USER_SCOPE).before(state.name);
    Call call(unit, inputs);
    if (state.clock != nullptr) state.used = ++*state.clock;
    returned = call.run(profiled);
    if (state.counter != nullptr) ++*state.counter;
  }
  return returned.release().ptr();
  END_HANDLE_TH_ERRORS
}

bool is_idle(const Unit* unit) { return unit->state != nullptr && unit->busy == 0; }

// unit(inputs): outputs, or MISSED if the call does not suit it. On an error `failed` is the line of the step.
PyObject* unit_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
  auto* unit = reinterpret_cast<Unit*>(self);
  if (PyVectorcall_NARGS(flags) != 1 || !PyList_CheckExact(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "a unit takes a list of inputs");
    return nullptr;
  }
  auto* inputs = arguments[0];
  try {
    // Whether somebody captures is asked first: while Python answers, other threads may do anything.
    const bool suits = unit->state != nullptr && !unit->state->guards.is_captured() && is_idle(unit) &&
                       unit->state->guards.device_suits() && PyList_GET_SIZE(inputs) == unit->state->inputs &&
                       unit->state->guards.hold(inputs);
    return suits ? replay(unit, inputs) : Py_NewRef(missed);
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (...) {  // a tensor without memory
    return Py_NewRef(missed);
  }
}

// Lets go of everything; the unit misses from now on.
PyObject* unit_clear(PyObject* self, PyObject*) {
  auto* unit = reinterpret_cast<Unit*>(self);
  if (unit->busy == process)
    unit->ended = true;  // when the call is over
  else
    unit->drop();
  Py_RETURN_NONE;
}

// Where a cell of Python's (ctypes.c_int64) has its number; null without a cell.
int64_t* cell(const py::handle& of) {
  if (of.is_none()) return nullptr;
  return reinterpret_cast<int64_t*>(py::cast<uintptr_t>(py::module_::import("ctypes").attr("addressof")(of)));
}

// expect(storages, counts, versions): cells and values
PyObject* unit_expect(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto* unit = reinterpret_cast<Unit*>(self);
  if (unit->state == nullptr) Py_RETURN_NONE;
  auto given = py::reinterpret_borrow<py::tuple>(arguments);
  auto& guards = unit->state->guards;
  guards.counts.clear();
  guards.versions.clear();
  auto storages = py::cast<py::list>(given[0]);
  auto counts = py::cast<std::vector<size_t>>(given[1]);
  TORCH_CHECK(storages.size() == counts.size());
  for (size_t i = 0; i < counts.size(); ++i)
    guards.counts.push_back({torch::createStorage(py::object(storages[i]).ptr()).unsafeGetStorageImpl(), counts[i]});
  for (auto version : given[2]) {
    auto expected = py::cast<py::tuple>(version);
    guards.versions.push_back({cell(expected[0]), py::cast<int64_t>(expected[1])});
  }
  guards.kept = given;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

int unit_traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* state = reinterpret_cast<Unit*>(self)->state;
  return state != nullptr ? state->traverse(visit, arg) : 0;
}

int unit_collect(PyObject* self) {
  reinterpret_cast<Unit*>(self)->drop();
  return 0;
}

void unit_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  reinterpret_cast<Unit*>(self)->drop();
  Py_TYPE(self)->tp_free(self);
}

PyObject* unit_failed(PyObject* self, void*) { return PyLong_FromLongLong(reinterpret_cast<Unit*>(self)->failed); }
PyObject* unit_abandoned(PyObject* self, void*) { return PyBool_FromLong(reinterpret_cast<Unit*>(self)->is_abandoned()); }
PyObject* unit_used(PyObject* self, void*) {
  auto* state = reinterpret_cast<Unit*>(self)->state;
  return PyLong_FromLongLong(state != nullptr ? state->used : 0);
}

PyTypeObject UnitType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// unit(description): a Description of graphs/replay/guards.py
PyObject* new_unit(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  const auto described = py::reinterpret_borrow<py::object>(argument);
  const auto conditions = py::object(described.attr("guards"));
  auto state = std::make_unique<UnitState>();
  state->inputs = py::cast<Py_ssize_t>(described.attr("inputs"));
  state->empties_inputs = py::cast<bool>(described.attr("empties_inputs"));
  state->slots.resize(py::cast<size_t>(described.attr("slots")));
  state->loads = py::cast<std::vector<Py_ssize_t>>(described.attr("loads"));
  state->kept_inputs = py::cast<std::vector<Py_ssize_t>>(described.attr("kept_inputs"));
  state->cleared = py::cast<std::vector<size_t>>(described.attr("cleared"));
  for (auto one : described.attr("steps")) {
    auto step = std::move(py::cast<MadeStep&>(one).step);
    TORCH_CHECK(step, "another unit has this step");
    step->join(state->shared);
    state->steps.push_back(std::move(step));
  }
  state->lines = py::cast<std::vector<int64_t>>(described.attr("lines"));
  state->lines.resize(state->steps.size(), -1);
  state->result.emplace(py::cast<const Value&>(described.attr("result")));
  state->name = py::cast<std::string>(described.attr("name"));
  state->ranges = py::cast<std::vector<std::pair<size_t, std::string>>>(described.attr("ranges"));
  auto& guards = state->guards;
  guards.addresses = py::cast<decltype(guards.addresses)>(conditions.attr("addresses"));
  guards.numbers = py::cast<decltype(guards.numbers)>(conditions.attr("numbers"));
  guards.dimensions = py::cast<decltype(guards.dimensions)>(conditions.attr("dimensions"));
  guards.packed = conditions.attr("packed");
  guards.overwritten = py::cast<std::vector<Py_ssize_t>>(conditions.attr("overwritten"));
  if (const auto mutated = py::object(conditions.attr("mutated_inputs")); !mutated.is_none()) {
    guards.moving = py::cast<std::vector<std::pair<Py_ssize_t, bool>>>(mutated.attr("moving"));
    guards.static_spans = py::cast<Spans>(mutated.attr("static_spans"));
    guards.written_static_spans = py::cast<Spans>(mutated.attr("written_static_spans"));
  }
  guards.no_hooks = py::cast<bool>(conditions.attr("no_hooks"));
  for (auto one : conditions.attr("locks")) {
    auto lock = py::cast<py::tuple>(one);
    guards.locks.emplace_back(py::object(lock[0]), cell(lock[1]));
  }
  if (!conditions.attr("device").is_none()) {
    guards.device = reinterpret_cast<THPDevice*>(py::object(conditions.attr("device")).ptr())->device;
    TORCH_CHECK(guards.device->has_index() && c10::impl::hasDeviceGuardImpl(guards.device->type()),
                "nothing tells the current stream of ", *guards.device);
  }
  for (auto stream : conditions.attr("streams")) guards.streams.push_back(cell(stream));
  if (!conditions.attr("caller_captures").is_none()) guards.caller_captures = conditions.attr("caller_captures");
  // What is at these addresses.
  state->kept = py::make_tuple(conditions.attr("locks"), conditions.attr("streams"), described.attr("count"),
                               described.attr("clock"));
  state->counter = cell(described.attr("count"));
  state->clock = cell(described.attr("clock"));
  if (!described.attr("give_back").is_none()) {
    state->give_back = described.attr("give_back");
    state->out_of_memory = py::module_::import("torch").attr("OutOfMemoryError");
    state->may_retry.resize(state->steps.size());
    for (auto at : py::cast<std::vector<size_t>>(described.attr("may_retry"))) state->may_retry.at(at) = true;
  }
  auto* unit = PyObject_GC_New(Unit, &UnitType);
  if (unit == nullptr) throw python_error();
  unit->call = unit_call;
  unit->state = state.release();
  unit->busy = 0;
  unit->ended = false;
  unit->failed = -1;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(unit));
  return reinterpret_cast<PyObject*>(unit);
  END_HANDLE_TH_ERRORS
}

PyMethodDef unit_methods[] = {{"clear", unit_clear, METH_NOARGS, nullptr},
                              {"expect", unit_expect, METH_VARARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyGetSetDef unit_attributes[] = {{"abandoned", unit_abandoned, nullptr, nullptr, nullptr},
                                 {"failed", unit_failed, nullptr, nullptr, nullptr},
                                 {"used", unit_used, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef functions[] = {{"unit", new_unit, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fxwrap_replay", nullptr, -1, functions};

}  // namespace
}  // namespace fxwrap

PyMODINIT_FUNC PyInit_fxwrap_replay() {
  using namespace fxwrap;
  UnitType.tp_name = "fxwrap_replay.Unit";
  UnitType.tp_basicsize = sizeof(Unit);
  UnitType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  UnitType.tp_traverse = unit_traverse;
  UnitType.tp_clear = unit_collect;
  UnitType.tp_free = PyObject_GC_Del;
  UnitType.tp_vectorcall_offset = offsetof(Unit, call);
  UnitType.tp_call = PyVectorcall_Call;
  UnitType.tp_dealloc = unit_dealloc;
  UnitType.tp_methods = unit_methods;
  UnitType.tp_getset = unit_attributes;
  if (PyType_Ready(&UnitType) < 0) return nullptr;
  auto* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  try {
    auto with_steps = py::reinterpret_borrow<py::module_>(module);
    define_steps(with_steps);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  missed = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (missed == nullptr || PyModule_AddObjectRef(module, "MISSED", missed) < 0) return nullptr;
  process = getpid();
  pthread_atfork(nullptr, nullptr, [] {
    process = getpid();
    is_forked = true;
    Call::forked();
  });
  KeptMemory::survive_forks();
  return module;
}
