#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

namespace backend {

// Room for CPU tensors like these in the workspace of this thread and a stream, for products to put the parts of their
// sums. Its address is what a graph captures. Nothing if they do not fit.
std::vector<at::Tensor> in_workspace(const std::vector<at::Tensor>& results, const c10::Stream& stream);

} // namespace backend
