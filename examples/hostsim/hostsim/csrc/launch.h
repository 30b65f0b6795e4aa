#pragma once

#include <torch/csrc/utils/pybind.h>

namespace backend {

// A compiled kernel does not pass through the dispatcher. This is how one is run, queued or recorded: as a Python
// callable, which gets CPU tensors over the memory of the device tensors it was launched with.
void launch(const pybind11::object& function, const pybind11::args& arguments);

} // namespace backend
