#include "launch.h"

#include "aliases.h"
#include "devices.h"
#include "name.h"
#include "streams.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <utility>

namespace backend {

namespace py = pybind11;

namespace {

// Python objects that a queue or a graph may release at any time, from any thread.
struct Launch {
  py::object function;
  py::tuple arguments;
};

std::shared_ptr<Launch> make_launch(py::object function, py::tuple arguments) {
  return {new Launch{std::move(function), std::move(arguments)}, [](Launch* launch) {
            if (!Py_IsInitialized()) {
              return; // They went with the interpreter.
            }
            py::gil_scoped_acquire gil;
            delete launch;
          }};
}

std::string name_of(const py::object& function) {
  return "launch " + std::string(py::str(py::getattr(function, "__name__", py::repr(function))));
}

// A tensor without memory of its own: of a tracer that asks for nothing but shapes.
bool is_symbolic(const at::Tensor& tensor) {
  return tensor.is_meta() || tensor.key_set().has(c10::DispatchKey::Python);
}

} // namespace

void launch(const py::object& function, const py::args& arguments) {
  Work work{name_of(function), {}};
  Aliases aliases(c10::DeviceType::CPU);
  py::tuple converted(arguments.size());
  c10::DeviceIndex device = -1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    py::object argument = arguments[i];
    if (THPVariable_Check(argument.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      if (is_symbolic(tensor)) {
        return;
      }
      if (tensor.device().type() == kDevice) {
        TORCH_CHECK(
            device == -1 || device == tensor.device().index(),
            work.name,
            ": its tensors are on ",
            DEVICE_NAME ":",
            static_cast<int>(device),
            " and on ",
            tensor.device());
        device = tensor.device().index();
        at::Tensor alias = aliases.of(tensor);
        // Nothing says what a kernel writes, so that all may be.
        work.memory.push_back(range_of(alias, true));
        argument = py::cast(alias);
      } else {
        TORCH_CHECK(tensor.is_cpu(), work.name, ": cannot take a tensor on ", tensor.device());
        if (tensor.dim() == 0) {
          argument = py::cast(tensor.clone()); // A number, by value: the program may change it before the work runs.
        }
      }
    }
    converted[i] = argument;
  }
  device = checked_device(device);
  work.run = [launch = make_launch(function, converted)] {
    py::gil_scoped_acquire gil;
    launch->function(*launch->arguments);
  };
  issue(current_stream(device), std::move(work));
}

} // namespace backend
