// Scaled dot product attention: the mathematics of torch's two fused kernels, with their results and layouts.
#pragma once
#include <torch/library.h>

namespace hostcuda::operators {
void register_attention(torch::Library& library);
}
