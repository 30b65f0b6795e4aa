// Operands and steps as Python makes them, for a unit to take.

#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include "kept_memory.h"
#include "lanes.h"
#include "products.h"
#include "nested_steps.h"

namespace fxwrap {

// None, where it cannot be made.
template <typename Kind, typename... Arguments>
py::object made(Arguments... arguments) {
  try {
    return py::cast(MadeStep{std::make_unique<Kind>(std::forward<Arguments>(arguments)...)});
  } catch (const NotNative&) {
    return py::none();
  }
}

// What makes operands and steps, for graphs/replay/lowering.py and steps.py.
inline void define_steps(py::module_& m) {
  using Kind = Value::Kind;
  using Parts = Value::Parts;
  using Given = const Value&;
  using Object = const py::object&;
  py::class_<Value>(m, "Value", py::module_local());
  py::class_<MadeStep>(m, "Step", py::module_local())
      .def_property_readonly("note", [](const MadeStep& made) { return made.step->note(); })
      .def_property(
          "range", [](const MadeStep& made) { return made.step->range; },
          [](const MadeStep& made, std::string name) { made.step->range = std::move(name); });
  m.def("slot", [](size_t slot) { return Value(slot); });
  m.def("constant", [](py::object value) { return Value(std::move(value)); });
  m.def("tuple", [](Parts parts) { return Value(Kind::Tuple, std::move(parts)); });
  m.def("list", [](Parts parts) { return Value(Kind::List, std::move(parts)); });
  m.def("slice", [](Parts bounds) { return Value(Kind::Slice, std::move(bounds)); });
  m.def("dict", [](Parts parts, std::vector<py::object> names) {
    return Value(Kind::Dict, std::move(parts), std::move(names));
  });

  // In graphs/replay/steps.py ``NATIVE`` says what each takes.
  m.def("empty", made<EmptyStep, const Results&, Given, Given, at::ScalarType>);
  m.def("view", made<ViewStep, const Results&, Given, Given, Given, Given>);
  m.def("resize", made<ResizeStep, c10::Storage, Given>);
  m.def("fill", made<FillStep, Given, Given>);
  m.def("kernel", made<KernelStep, Given, Object, Given, Given>);
  m.def("operator", made<OperatorStep, const Results&, Object, Given, Given>);
  m.def("product", [](const Results& results, Object overload, Given args, Given kwargs, std::optional<std::array<uint64_t, 3>> gemms) {
    auto product = gemms ? made<ProductStep>(results, overload, args, kwargs, Gemms(*gemms)) : py::none();
    return product.is_none() ? made<OperatorStep>(results, overload, args, kwargs) : product;
  });
  m.def("number", made<NumberStep, const Results&, Object, Given, Given>);
  m.def("arithmetic", made<ArithmeticStep, const Results&, Object, Given, MadeStep&>);
  m.def("layout", made<LayoutStep, Given, MadeStep&>);
  m.def("alignment", made<AlignmentStep, Given, MadeStep&>);
  m.def("condition", made<ConditionStep, Given, MadeStep&>);
  m.def("move", made<MoveStep, const Results&, Given, Given>);
  m.def("branch", made<BranchStep, Given, const Blocks&, Given>);
  m.def("loop", made<LoopStep, Results, Given, const Results&, const Blocks&, Given, Given>);
  m.def("lanes", made<LanesStep, const Blocks&, const std::vector<size_t>&, const LanesStep::Waits&, std::vector<int64_t>>);
  m.def("item", made<ItemStep, const Results&, Given, Given>);

  m.def("python", made<PythonStep, Object, Parts, const py::tuple&, Results, bool>);
  m.def("set", made<SetStep, size_t, Given>);
  m.def("drop", made<DropStep, size_t>);
  m.def("below_autograd", made<BelowAutogradStep, bool>);

  py::class_<KeptRegion>(m, "KeptRegion", py::module_local())
      .def(py::init<size_t>())
      .def_property_readonly("storage", [](const KeptRegion& region) {
        return py::reinterpret_steal<py::object>(torch::createPyObject(region.storage()));
      });
  m.def("kept_memory", [] { return KeptMemory::all().idle(); });
}

}  // namespace fxwrap
