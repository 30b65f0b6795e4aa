// Operands and steps as Python makes them, for a unit to take.

#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

#include "kept_memory.h"
#include "products.h"
#include "python_steps.h"

namespace fxwrap {

// A step as Python has it, until a unit takes it.
struct MadeStep {
  std::unique_ptr<Step> step;
};

template <typename Kind, typename... Arguments>
MadeStep made(Arguments&&... arguments) {
  return {std::make_unique<Kind>(std::forward<Arguments>(arguments)...)};
}

inline std::unique_ptr<PythonStep> python_in(MadeStep& made) {
  TORCH_CHECK(dynamic_cast<PythonStep*>(made.step.get()) != nullptr, "this is no call of Python");
  return std::unique_ptr<PythonStep>(static_cast<PythonStep*>(made.step.release()));
}

// What makes operands and steps, for graphs/replay/lowering.py and steps.py.
inline void define_steps(py::module_& m) {
  using Parts = Value::Parts;
  py::class_<Value>(m, "Value", py::module_local());
  py::class_<MadeStep>(m, "Step", py::module_local());
  using Kind = Value::Kind;
  m.def("slot", [](size_t slot) { return Value(Kind::Slot, slot); });
  m.def("moved", [](size_t slot) { return Value(Kind::Moved, slot); });
  m.def("constant", [](py::object value) { return Value(std::move(value)); });
  m.def("tuple", [](Parts parts) { return Value(Kind::Tuple, std::move(parts)); });
  m.def("list", [](Parts parts) { return Value(Kind::List, std::move(parts)); });
  m.def("slice", [](Parts bounds) { return Value(Kind::Slice, std::move(bounds)); });
  m.def("dict", [](Parts parts, std::vector<py::object> names) {
    return Value(Kind::Dict, std::move(parts), std::move(names));
  });

  m.def("kernel", made<KernelStep, uint64_t, py::object, const Parts&, const std::vector<size_t>&, const std::vector<size_t>&>);
  m.def("operator", made<OperatorStep, const std::string&, const std::string&, const std::vector<std::optional<Value>>&,
                         const std::vector<std::optional<size_t>>&>);
  m.def("product", made<ProductStep, const std::string&, const std::string&, const std::vector<std::optional<Value>>&,
                        const std::vector<std::optional<size_t>>&, std::pair<uint64_t, uint64_t>>);
  m.def("python", made<PythonStep, py::object, Parts, const py::tuple&, std::vector<size_t>, bool>);
  m.def("empty", [](size_t slot, const Value& size, const Value& stride, const py::object& dtype) {
    TORCH_CHECK(THPDtype_Check(dtype.ptr()));
    return made<EmptyStep>(slot, Sizes(size), Sizes(stride), reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
  m.def("view", [](size_t slot, const Value& base, const Value& size, const Value& stride, const Value& offset) {
    return made<ViewStep>(slot, Operand(base), Sizes(size), Sizes(stride), Number(offset));
  });
  m.def("fill", made<FillStep, std::vector<at::Tensor>, const Parts&>);
  m.def("resize", [](const py::object& storage, size_t bytes) {
    return made<ResizeStep>(torch::createStorage(storage.ptr()), bytes);
  });
  py::class_<KeptRegion>(m, "KeptRegion", py::module_local())
      .def(py::init<size_t>())
      .def_property_readonly("storage", [](const KeptRegion& region) {
        return py::reinterpret_steal<py::object>(torch::createPyObject(region.storage()));
      });
  m.def("kept_memory", [] { return KeptMemory::all().idle(); });
  m.def("item", made<ItemStep, size_t, size_t, Py_ssize_t>);
  m.def("set", made<SetStep, size_t, const Value&>);
  m.def("copy", made<CopyStep, size_t, size_t>);
  m.def("drop", made<DropStep, size_t>);
  m.def("below_autograd", made<BelowAutogradStep, bool>);

  m.def("layout", [](const Value& tensor, const Value& size, const Value& stride, MadeStep& python) {
    return made<LayoutStep>(Operand(tensor), Sizes(size), Sizes(stride), python_in(python));
  });
  m.def("alignment", [](const Value& tensor, uint64_t bytes, MadeStep& python) {
    return made<AlignmentStep>(Operand(tensor), bytes, python_in(python));
  });
  m.def("condition", [](const Value& condition, MadeStep& python) {
    return made<ConditionStep>(Number(condition), python_in(python));
  });
  m.def("arithmetic", [](size_t slot, size_t operation, const Value& first, const Value& second, MadeStep& python) {
    return made<ArithmeticStep>(slot, operation, Number(first), Number(second), python_in(python));
  });
  py::list operations;
  for (const auto& one : ArithmeticStep::operations()) operations.append(py::make_tuple(one.name, one.operands));
  m.attr("OPERATIONS") = operations;
}

}  // namespace fxwrap
