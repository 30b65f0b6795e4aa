// Replays recordings without Python: a unit is a list of steps over slots, made by graphs/units.py.
//
// A step calls a kernel by its address, an operator through the dispatcher, or a Python function. There is nothing to
// compile for a program: beside what an operator costs, going through a list of steps costs nothing.
//
// Everything here runs with the interpreter's lock but the steps of a unit that need no Python.

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <unistd.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/inductor_ops.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Who holds a lock: what another thread was doing in the parent of a fork is nobody's work in the child.
int64_t process = 0;

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
    tensor = std::move(value);
    kind = Kind::Tensor;
  }
  void set(int64_t value, bool boolean = false) {
    number = value;
    kind = boolean ? Kind::Boolean : Kind::Integer;
  }
  void set(PyObject* value) {  // steals nothing
    if (THPVariable_Check(value)) return set(THPVariable_Unpack(value));
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
const Slots kNoSlots;

py::object owned(PyObject* value) {
  if (value == nullptr) throw python_error();
  return py::reinterpret_steal<py::object>(value);
}

// A value of Python's in which slots stand for what is in them.
class Value {
 public:
  enum class Kind { Constant, Slot, Taken, Tuple, List, Slice, Dict };

  explicit Value(const py::handle& described) {
    auto pair = py::cast<py::tuple>(described);
    auto kind = py::cast<std::string>(pair[0]);
    py::object content = pair[1];
    if (kind == "constant") {
      kind_ = Kind::Constant;
      constant_ = content;
      return;
    }
    if (kind == "slot" || kind == "taken") {
      kind_ = kind == "slot" ? Kind::Slot : Kind::Taken;
      slot_ = py::cast<size_t>(content);
      return;
    }
    kind_ = kind == "tuple" ? Kind::Tuple : kind == "list" ? Kind::List : kind == "slice" ? Kind::Slice : Kind::Dict;
    if (kind_ == Kind::Dict) {
      for (auto item : py::cast<py::dict>(content)) {
        names_.push_back(py::reinterpret_borrow<py::object>(item.first));
        parts_.emplace_back(item.second);
      }
    } else {
      for (auto part : content) parts_.emplace_back(part);
    }
  }

  bool is_slot() const { return kind_ == Kind::Slot; }
  bool is_list() const { return kind_ == Kind::List || kind_ == Kind::Tuple; }
  bool is_constant() const {
    if (kind_ == Kind::Slot || kind_ == Kind::Taken) return false;
    for (const auto& part : parts_)
      if (!part.is_constant()) return false;
    return true;
  }
  size_t slot() const { return slot_; }
  const std::vector<Value>& parts() const { return parts_; }

  py::object make() const {
    Slots none;
    return make(none);
  }
  py::object make(Slots& slots) const {
    switch (kind_) {
      case Kind::Constant:
        return constant_;
      case Kind::Slot:
        return owned(slots[slot_].get());
      case Kind::Taken: {
        auto taken = owned(slots[slot_].get());
        slots[slot_].clear();
        return taken;
      }
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
  Kind kind_ = Kind::Constant;
  py::object constant_;
  size_t slot_ = 0;
  std::vector<Value> parts_;
  std::vector<py::object> names_;
};

// A tensor that is known, or in a slot.
class Operand {
 public:
  explicit Operand(const Value& value) {
    if (value.is_slot())
      slot_ = static_cast<long>(value.slot());
    else
      tensor_ = THPVariable_Unpack(value.make().ptr());
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
    if (value.is_slot())
      slot_ = static_cast<long>(value.slot());
    else
      number_ = py::cast<int64_t>(value.make());
  }
  bool known() const { return slot_ < 0; }
  bool there(const Slots& slots) const { return known() || slots[static_cast<size_t>(slot_)].is_number(); }
  int64_t in(const Slots& slots) const {
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
  explicit Sizes(const py::handle& described) {
    for (auto part : described) {
      parts_.emplace_back(Value(part));
      known_ = known_ && parts_.back().known();
    }
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

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(Slots& slots) = 0;
  // Whether it needs the interpreter's lock, works so long that others should have it, or neither.
  enum class Lock { Needed, InTheWay, Either };
  virtual Lock lock() const { return Lock::Either; }
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
        values_.push_back(constant(value.make(), declared.type()));
        continue;
      }
      values_.emplace_back();
      auto type = declared.type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (value.is_slot() && (type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::IntType))
        holes_.push_back({i, value.slot()});
      else
        others_.push_back({i, std::move(value), declared.type()});
    }
    for (auto result : results) results_.push_back(result.is_none() ? -1 : py::cast<long>(result));
    TORCH_CHECK(results_.empty() || results_.size() == schema.returns().size());
    stack_.reserve(std::max(values_.size(), schema.returns().size()));
  }

  Lock lock() const override { return others_.empty() ? Lock::InTheWay : Lock::Needed; }

  // A number where a tensor is declared takes the other operand's dtype, as in torch's own functions.
  static c10::IValue constant(const py::object& value, const c10::TypePtr& type) {
    const bool number = PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) ||
                        PyComplex_Check(value.ptr());
    if (type->kind() != c10::TypeKind::TensorType || !number) return torch::jit::toIValue(value, type);
    at::AutoDispatchBelowADInplaceOrView guard;
    auto tensor = at::scalar_to_tensor(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  void run(Slots& slots) override {
    struct Emptied {  // also on errors: nothing is kept between calls
      std::vector<c10::IValue>& stack;
      ~Emptied() { stack.clear(); }
    } emptied{stack_};
    stack_.assign(values_.begin(), values_.end());
    for (const auto& [position, slot] : holes_) {
      const auto& found = slots[slot];
      if (found.kind == Slot::Kind::Tensor)
        stack_[position] = found.tensor;
      else if (found.is_number())
        stack_[position] = found.number;
      else  // None, where a tensor is optional
        TORCH_CHECK_TYPE(found.kind == Slot::Kind::Nothing, "fxwrap: an operand is neither a tensor nor an integer");
    }
    for (const auto& [position, value, type] : others_)
      stack_[position] = torch::jit::toIValue(value.make(slots), type);
    operator_.callBoxed(&stack_);
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

// Looks at a tensor, and has Python say what is wrong, if anything.
class LayoutStep : public Step {
 public:
  LayoutStep(Operand operand, Sizes size, Sizes stride, std::unique_ptr<PythonStep> say)
      : operand_(std::move(operand)), size_(std::move(size)), stride_(std::move(stride)), say_(std::move(say)) {}
  void run(Slots& slots) override {
    const auto& tensor = operand_.in(slots);
    if (tensor.defined() && tensor.sizes() == size_.in(slots) && tensor.strides() == stride_.in(slots)) return;
    py::gil_scoped_acquire locked;
    say_->run(slots);
  }

 private:
  Operand operand_;
  Sizes size_, stride_;
  std::unique_ptr<PythonStep> say_;
};

class AlignmentStep : public Step {
 public:
  AlignmentStep(Operand operand, uint64_t bytes, std::unique_ptr<PythonStep> say)
      : operand_(std::move(operand)), bytes_(bytes), say_(std::move(say)) {}
  void run(Slots& slots) override {
    const auto& tensor = operand_.in(slots);
    if (tensor.defined() && reinterpret_cast<uint64_t>(tensor.const_data_ptr()) % bytes_ == 0) return;
    py::gil_scoped_acquire locked;
    say_->run(slots);
  }

 private:
  Operand operand_;
  uint64_t bytes_;
  std::unique_ptr<PythonStep> say_;
};

class CheckStep : public Step {
 public:
  CheckStep(Number condition, std::unique_ptr<PythonStep> say) : condition_(condition), say_(std::move(say)) {}
  void run(Slots& slots) override {
    if (condition_.there(slots) && condition_.in(slots) != 0) return;
    py::gil_scoped_acquire locked;
    say_->run(slots);
  }

 private:
  Number condition_;
  std::unique_ptr<PythonStep> say_;
};

// Arithmetic of sizes. What does not fit in 64 bits, and other numbers than integers, are Python's.
class IntegerStep : public Step {
 public:
  IntegerStep(size_t slot, std::string operation, Number first, Number second, std::unique_ptr<PythonStep> python)
      : slot_(slot), operation_(std::move(operation)), first_(first), second_(second), python_(std::move(python)) {}
  void run(Slots& slots) override {
    if (first_.there(slots) && second_.there(slots) && compute(first_.in(slots), second_.in(slots), slots[slot_])) return;
    py::gil_scoped_acquire locked;
    python_->run(slots);
  }

 private:
  bool compute(int64_t a, int64_t b, Slot& slot) const {
    int64_t made = 0;
    if (operation_ == "add") {
      if (__builtin_add_overflow(a, b, &made)) return false;
    } else if (operation_ == "sub") {
      if (__builtin_sub_overflow(a, b, &made)) return false;
    } else if (operation_ == "mul") {
      if (__builtin_mul_overflow(a, b, &made)) return false;
    } else if (operation_ == "floordiv" || operation_ == "mod") {
      if (a < 0 || b <= 0) return false;
      made = operation_ == "mod" ? a % b : a / b;
    } else {
      slot.set(operation_ == "ge"   ? a >= b
               : operation_ == "le" ? a <= b
               : operation_ == "gt" ? a > b
               : operation_ == "lt" ? a < b
               : operation_ == "eq" ? a == b
                                    : a != b,
               true);
      return true;
    }
    slot.set(made);
    return true;
  }
  size_t slot_;
  std::string operation_;
  Number first_, second_;
  std::unique_ptr<PythonStep> python_;
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

// -- inputs -----------------------------------------------------------------------------------------------

// What a call has to look like.
struct Guards {
  struct Address {
    Py_ssize_t position;
    uint64_t address;
  };
  struct Number {
    Py_ssize_t position;
    int64_t value;
  };
  struct Dimension {
    Py_ssize_t position;
    bool stride;
    int64_t dimension, value;
  };
  std::vector<Address> addresses;
  std::vector<Number> numbers;
  std::vector<Dimension> dimensions;
  struct Count {
    c10::StorageImpl* storage;
    size_t uses;
  };
  struct Cell {
    const int64_t* at;
    int64_t value;
  };
  std::vector<py::object> empty;  // dictionaries
  bool no_hooks = false;          // nobody packs what autograd saves
  std::optional<at::Device> device;
  std::vector<const int64_t*> streams;
  std::vector<std::pair<py::object, int64_t*>> locks;
  py::object caller_captures, kept;
  std::vector<Count> counts;
  std::vector<Cell> versions;

  static const at::Tensor* tensor_at(PyObject* inputs, Py_ssize_t position) {
    auto* value = PyList_GET_ITEM(inputs, position);
    return THPVariable_Check(value) ? &THPVariable_Unpack(value) : nullptr;
  }

  // Locks first: what others have under way is theirs to look at.
  bool is_free() const {
    for (const auto& [owners, native] : locks)
      if (PyDict_GET_SIZE(owners.ptr()) != 0 || *native == process) return false;
    for (const auto& [at, value] : versions)
      if (*at != value) return false;
    for (const auto& [storage, uses] : counts)
      if (c10::raw::intrusive_ptr::use_count(storage) != uses) return false;
    return true;
  }

  bool device_suits() const {
    if (!device.has_value()) return true;
    const auto* guard = c10::impl::getDeviceGuardImpl(device->type());
    if (guard->getDevice() != *device) return false;
    const auto stream = guard->getStream(*device).id();
    for (const auto* last : streams)
      if (*last != stream) return false;
    // The default stream cannot be captured.
    return stream == 0 || !caller_captures || !py::cast<bool>(owned(PyObject_CallNoArgs(caller_captures.ptr())));
  }

  bool hold(PyObject* inputs) const {
    if (!is_free() || !device_suits()) return false;
    for (const auto& dictionary : empty)
      if (PyDict_GET_SIZE(dictionary.ptr()) != 0) return false;
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
      if (tensor == nullptr || reinterpret_cast<uint64_t>(tensor->const_data_ptr()) != address) return false;
    }
    return !no_hooks || !at::SavedTensorDefaultHooks::get_hooks(true).has_value();
  }
};

// -- units ------------------------------------------------------------------------------------------------

struct UnitState {
  Py_ssize_t inputs = 0;
  bool empties_inputs = false;  // at once; else at the end
  Slots slots;
  std::vector<std::pair<Py_ssize_t, size_t>> loads;  // input -> slot
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<ResizeStep*> regions;
  std::vector<size_t> cleared;  // slots, at the end of a call
  std::optional<Value> result;
  Guards guards;
  std::shared_ptr<std::optional<at::AutoDispatchBelowAutograd>> below =
      std::make_shared<std::optional<at::AutoDispatchBelowAutograd>>();
  py::object kept;
  int64_t* counter = nullptr;
  int64_t* clock = nullptr;
  int64_t used = 0;
};

struct Unit {
  PyObject_HEAD
  vectorcallfunc call;
  UnitState* state;
  int64_t busy;  // the process whose thread is in a call
  bool ended;
  Py_ssize_t failed;
};

PyObject* missed = nullptr;

class Call {
 public:
  Call(Unit* unit, PyObject* inputs) : unit_(unit), state_(*unit->state), inputs_(inputs) {
    unit_->busy = process;
    for (const auto& [owners, native] : state_.guards.locks) *native = process;
    Py_INCREF(unit_);
  }
  ~Call() {
    if (!done_) {
      for (auto& slot : state_.slots) slot.clear();
      for (auto* region : state_.regions) region->empty();
    }
    for (auto slot : state_.cleared) state_.slots[slot].clear();
    if (!state_.empties_inputs) PyList_SetSlice(inputs_, 0, PY_SSIZE_T_MAX, nullptr);
    unit_->busy = 0;
    for (const auto& [owners, native] : state_.guards.locks) *native = 0;
    if (unit_->ended) delete std::exchange(unit_->state, nullptr);
    Py_DECREF(unit_);
  }

  py::object run() {
    for (const auto& [position, slot] : state_.loads) state_.slots[slot].set(PyList_GET_ITEM(inputs_, position));
    if (state_.empties_inputs && PyList_SetSlice(inputs_, 0, PY_SSIZE_T_MAX, nullptr) != 0) throw python_error();
    Py_ssize_t at = 0;
    try {
      InterpreterLock lock;
      struct Below {  // wherever the call ends
        std::optional<at::AutoDispatchBelowAutograd>& state;
        ~Below() { state.reset(); }
      } below{*state_.below};
      for (auto& step : state_.steps) {
        const auto wanted = step->lock();
        if (wanted == Step::Lock::Needed)
          lock.acquire();
        else if (wanted == Step::Lock::InTheWay)
          lock.release();
        step->run(state_.slots);
        ++at;
      }
    } catch (...) {
      unit_->failed = at;
      throw;
    }
    auto returned = state_.result->make(state_.slots);
    done_ = true;
    return returned;
  }

 private:
  Unit* unit_;
  UnitState& state_;
  PyObject* inputs_;
  bool done_ = false;
};

PyObject* replay(Unit* unit, PyObject* inputs) {
  HANDLE_TH_ERRORS
  auto& state = *unit->state;
  py::object returned;
  {
    Call call(unit, inputs);
    if (state.clock != nullptr) state.used = ++*state.clock;
    returned = call.run();
    if (state.counter != nullptr) ++*state.counter;
  }
  return returned.release().ptr();
  END_HANDLE_TH_ERRORS
}

// unit(inputs): outputs, or MISSED if the call does not suit it. On an error `failed` is the position of the step.
PyObject* unit_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
  auto* unit = reinterpret_cast<Unit*>(self);
  if (PyVectorcall_NARGS(flags) != 1 || !PyList_CheckExact(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "a unit takes a list of inputs");
    return nullptr;
  }
  auto* inputs = arguments[0];
  unit->failed = -1;
  if (unit->state == nullptr || unit->busy == process || PyList_GET_SIZE(inputs) != unit->state->inputs)
    return Py_NewRef(missed);
  bool suits = false;
  try {
    suits = unit->state->guards.hold(inputs);
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (...) {  // a tensor without memory
  }
  return suits ? replay(unit, inputs) : Py_NewRef(missed);
}

// Lets go of everything; the unit misses from now on.
PyObject* unit_clear(PyObject* self, PyObject*) {
  auto* unit = reinterpret_cast<Unit*>(self);
  if (unit->busy == process)
    unit->ended = true;  // when the call is over
  else
    delete std::exchange(unit->state, nullptr);
  Py_RETURN_NONE;
}

// expect(storages, counts, versions): cells, addresses and values
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
    auto cell = py::cast<py::tuple>(version);
    guards.versions.push_back({reinterpret_cast<const int64_t*>(py::cast<uintptr_t>(cell[1])), py::cast<int64_t>(cell[2])});
  }
  guards.kept = given;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void unit_dealloc(PyObject* self) {
  delete std::exchange(reinterpret_cast<Unit*>(self)->state, nullptr);
  Py_TYPE(self)->tp_free(self);
}

PyObject* unit_failed(PyObject* self, void*) { return PyLong_FromSsize_t(reinterpret_cast<Unit*>(self)->failed); }
PyObject* unit_used(PyObject* self, void*) {
  auto* state = reinterpret_cast<Unit*>(self)->state;
  return PyLong_FromLongLong(state != nullptr ? state->used : 0);
}

std::unique_ptr<Step> made(UnitState& state, const py::tuple& described) {
  auto kind = py::cast<std::string>(described[0]);
  auto slot = [&](size_t i) { return py::cast<size_t>(described[i]); };
  if (kind == "kernel") return std::make_unique<KernelStep>(py::cast<uint64_t>(described[1]), py::list(described[2]));
  if (kind == "operator")
    return std::make_unique<OperatorStep>(py::cast<std::string>(described[1]), py::cast<std::string>(described[2]),
                                          py::list(described[3]), py::list(described[4]));
  if (kind == "empty")
    return std::make_unique<EmptyStep>(slot(1), Sizes(described[2]), Sizes(described[3]),
                                       reinterpret_cast<THPDtype*>(py::object(described[4]).ptr())->scalar_type);
  if (kind == "view")
    return std::make_unique<ViewStep>(slot(1), Operand(Value(described[2])), Sizes(described[3]), Sizes(described[4]),
                                      Number(Value(described[5])));
  if (kind == "fill") return std::make_unique<FillStep>(py::list(described[1]), py::list(described[2]));
  if (kind == "resize") {
    auto step = std::make_unique<ResizeStep>(torch::createStorage(py::object(described[1]).ptr()), slot(2));
    state.regions.push_back(step.get());
    return step;
  }
  auto python = [&](size_t i) {
    return std::make_unique<PythonStep>(py::object(described[i]), py::list(described[i + 1]),
                                        py::dict(described[i + 2]), py::list(described[i + 3]),
                                        py::cast<bool>(described[i + 4]));
  };
  if (kind == "python") return python(1);
  if (kind == "layout")
    return std::make_unique<LayoutStep>(Operand(Value(described[1])), Sizes(described[2]), Sizes(described[3]), python(4));
  if (kind == "alignment")
    return std::make_unique<AlignmentStep>(Operand(Value(described[1])), py::cast<uint64_t>(described[2]), python(3));
  if (kind == "check") return std::make_unique<CheckStep>(Number(Value(described[1])), python(2));
  if (kind == "integer")
    return std::make_unique<IntegerStep>(slot(1), py::cast<std::string>(described[2]), Number(Value(described[3])),
                                         Number(Value(described[4])), python(5));
  if (kind == "item") return std::make_unique<ItemStep>(slot(1), slot(2), py::cast<Py_ssize_t>(described[3]));
  if (kind == "set") return std::make_unique<SetStep>(slot(1), Value(described[2]));
  if (kind == "copy") return std::make_unique<CopyStep>(slot(1), slot(2));
  if (kind == "drop") return std::make_unique<DropStep>(slot(1));
  if (kind == "below autograd") return std::make_unique<BelowAutogradStep>(state.below, py::cast<bool>(described[1]));
  throw py::value_error("a unit has no step of the kind " + kind);
}

PyTypeObject UnitType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// unit(description): a dictionary, whose entries graphs/units.py explains
PyObject* new_unit(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto described = py::reinterpret_borrow<py::dict>(argument);
  auto state = std::make_unique<UnitState>();
  state->inputs = py::cast<Py_ssize_t>(described["inputs"]);
  state->empties_inputs = py::cast<bool>(described["empties_inputs"]);
  state->slots.resize(py::cast<size_t>(described["slots"]));
  state->loads = py::cast<std::vector<std::pair<Py_ssize_t, size_t>>>(described["loads"]);
  state->cleared = py::cast<std::vector<size_t>>(described["cleared"]);
  for (auto step : described["steps"]) state->steps.push_back(made(*state, py::cast<py::tuple>(step)));
  state->result.emplace(described["result"]);
  auto& guards = state->guards;
  for (auto one : described["addresses"]) {
    auto [position, address] = py::cast<std::pair<Py_ssize_t, uint64_t>>(one);
    guards.addresses.push_back({position, address});
  }
  for (auto one : described["numbers"]) {
    auto [position, value] = py::cast<std::pair<Py_ssize_t, int64_t>>(one);
    guards.numbers.push_back({position, value});
  }
  for (auto one : described["dimensions"]) {
    auto [position, stride, dimension, value] = py::cast<std::tuple<Py_ssize_t, bool, int64_t, int64_t>>(one);
    guards.dimensions.push_back({position, stride, dimension, value});
  }
  for (auto one : described["empty"]) guards.empty.push_back(py::reinterpret_borrow<py::object>(one));
  guards.no_hooks = py::cast<bool>(described["no_hooks"]);
  auto cell = [](const py::handle& address) { return reinterpret_cast<int64_t*>(py::cast<uintptr_t>(address)); };
  auto addresses = py::list(described["lock_addresses"]);
  size_t position = 0;
  for (auto lock : described["locks"]) {
    auto owners = py::cast<py::tuple>(lock)[0];
    guards.locks.emplace_back(py::object(owners), cell(addresses[position++]));
  }
  if (!described["device"].is_none()) {
    guards.device = reinterpret_cast<THPDevice*>(py::object(described["device"]).ptr())->device;
    TORCH_CHECK(guards.device->has_index() && c10::impl::hasDeviceGuardImpl(guards.device->type()),
                "nothing tells the current stream of ", *guards.device);
  }
  for (auto address : described["stream_addresses"]) guards.streams.push_back(cell(address));
  if (!described["caller_captures"].is_none()) guards.caller_captures = described["caller_captures"];
  // What is at these addresses.
  state->kept = py::make_tuple(described["locks"], described["streams"], described["count"], described["clock"]);
  state->counter = cell(described["count_address"]);
  state->clock = cell(described["clock_address"]);
  auto* unit = PyObject_New(Unit, &UnitType);
  if (unit == nullptr) throw python_error();
  unit->call = unit_call;
  unit->state = state.release();
  unit->busy = 0;
  unit->ended = false;
  unit->failed = -1;
  return reinterpret_cast<PyObject*>(unit);
  END_HANDLE_TH_ERRORS
}

PyMethodDef unit_methods[] = {{"clear", unit_clear, METH_NOARGS, nullptr},
                              {"expect", unit_expect, METH_VARARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyGetSetDef unit_attributes[] = {{"failed", unit_failed, nullptr, nullptr, nullptr},
                                 {"used", unit_used, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef functions[] = {{"unit", new_unit, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fxwrap_replay", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_fxwrap_replay() {
  UnitType.tp_name = "fxwrap_replay.Unit";
  UnitType.tp_basicsize = sizeof(Unit);
  UnitType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  UnitType.tp_vectorcall_offset = offsetof(Unit, call);
  UnitType.tp_call = PyVectorcall_Call;
  UnitType.tp_dealloc = unit_dealloc;
  UnitType.tp_methods = unit_methods;
  UnitType.tp_getset = unit_attributes;
  if (PyType_Ready(&UnitType) < 0) return nullptr;
  auto* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  missed = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (missed == nullptr || PyModule_AddObjectRef(module, "MISSED", missed) < 0) return nullptr;
  process = getpid();
  pthread_atfork(nullptr, nullptr, [] { process = getpid(); });
  return module;
}
