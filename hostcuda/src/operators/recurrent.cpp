#include "recurrent.h"

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace hostcuda::operators {

namespace {
using at::Tensor;
using Bias = std::optional<Tensor>;

// Operators that are taken over themselves: what they compute is issued to the stream.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, const Bias& input_bias,
                                    const Bias& hidden_bias) {
  const bool biased = input_bias && input_bias->defined();
  const auto of_input = (biased ? input + *input_bias : input).chunk(3, 1);
  const auto of_hidden = (biased ? hidden + *hidden_bias : hidden).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), keep = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  // Contiguous whatever the operands are, as torch's own kernel has them: who calls it counts on that.
  return {(candidate + keep * (hx - candidate)).contiguous(), at::cat({reset, keep, candidate, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace,
                                                                     bool biased) {
  const auto saved = workspace.chunk(5, 1); // as gru_cell has put them
  const Tensor &reset = saved[0], &keep = saved[1], &candidate = saved[2], &hx = saved[3], &of_hidden = saved[4];
  const Tensor of_candidate = grad * (1 - keep) * (1 - candidate * candidate);
  const Tensor of_keep = grad * (hx - candidate) * (1 - keep) * keep;
  const Tensor of_reset = of_candidate * of_hidden * (1 - reset) * reset;
  const Tensor to_input = at::cat({of_reset, of_keep, of_candidate}, 1);
  const Tensor to_hidden = at::cat({of_reset, of_keep, of_candidate * reset}, 1);
  const auto of_bias = [&](const Tensor& one) { return biased ? one.sum(0) : Tensor(); };
  return {to_input, to_hidden, (grad * keep).contiguous(), of_bias(to_input), of_bias(to_hidden)};
}
} // namespace

void register_recurrent(torch::Library& library) {
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

} // namespace hostcuda::operators
