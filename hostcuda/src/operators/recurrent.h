// A GRU's cell: the mathematics of torch's fused kernel, which has no counterpart on the CPU.
#pragma once
#include <torch/library.h>

namespace hostcuda::operators {
void register_recurrent(torch::Library& library);
}
