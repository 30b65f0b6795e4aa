#pragma once

#include <ATen/core/Tensor.h>

namespace backend {

// Between device tensors, or between a device tensor and one of the host, with conversion and broadcasting.
at::Tensor copy_between(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

// Each tensor to its destination, as one piece of work where that needs neither conversion nor broadcasting.
void copy_lists(at::TensorList destinations, at::TensorList sources, bool non_blocking);

} // namespace backend
