#include "attention.h"

#include "tensors.h"

#include <cmath>
#include <limits>
#include <tuple>

namespace hostcuda::operators {

namespace {
using at::Tensor;
using Scale = std::optional<double>;

// Queries, keys and values are (batch, heads, length, size). Computed in float, or double.
struct Attention {
  Tensor q, k, v, bias;
  double scale, p;
  bool causal;

  at::ScalarType type() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
  Tensor for_all_heads(const Tensor& t) const { // heads of keys and values that several queries share
    auto f = t.to(type());
    return t.size(1) == q.size(1) ? f : f.repeat_interleave(q.size(1) / t.size(1), 1);
  }
  Tensor of_shared_heads(const Tensor& grad, int64_t heads) const {
    if (grad.size(1) == heads) return grad;
    return grad.reshape({grad.size(0), heads, grad.size(1) / heads, grad.size(2), grad.size(3)}).sum(2);
  }
  Tensor scores() const {
    auto result = at::matmul(q.to(type()), for_all_heads(k).transpose(-2, -1)) * scale;
    if (bias.defined()) result = result + bias.to(type());
    if (!causal) return result;
    auto seen = at::ones({q.size(-2), k.size(-2)}, at::TensorOptions().dtype(at::kBool)).tril();
    return result.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  Tensor dropout(const Tensor& like, std::pair<uint64_t, uint64_t> seed_and_offset) const {
    if (p == 0) return at::ones_like(like);
    auto noise = at::empty(like.sizes(), like.options()).uniform_(0, 1, cpu_generator(seed_and_offset));
    return noise.ge(p).to(like.scalar_type()) / (1 - p);
  }
};
Attention on_host(Aliases& aliases, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, double p,
                  bool causal, Scale scale) {
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(-1))));
  return {aliases.of(q), aliases.of(k), aliases.of(v), bias.defined() ? aliases.of(bias) : bias, factor, p, causal};
}

// Where dropout's seed and offset are kept for the backward: two scalars, or one tensor of two.
struct State {
  Tensor seed, offset;
  State of(Aliases& aliases) const {
    auto alias = [&](const Tensor& t) { return on_device(t) ? aliases.of(t) : t; };
    return {alias(seed), alias(offset)};
  }
  std::pair<Tensor, Tensor> parts() const {
    if (seed.dim() == 0) return {seed, offset};
    auto both = seed.view(at::kLong);
    return {both[0], both[1]};
  }
  void write(std::pair<uint64_t, uint64_t> values) const {
    if (!seed.defined()) return;
    auto [first, second] = parts();
    first.fill_(static_cast<int64_t>(values.first));
    second.fill_(static_cast<int64_t>(values.second));
  }
  std::pair<uint64_t, uint64_t> read() const {
    auto [first, second] = parts();
    return {first.item<int64_t>(), second.item<int64_t>()};
  }
};
Tensor on_device_of(at::ScalarType type, at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(type).device(at::kCUDA));
}
// As the efficient kernels lay out their results: (batch, length, heads, size).
Tensor empty_by_length(const Tensor& like, int64_t size) {
  return at::empty({like.size(0), like.size(2), like.size(1), size}, like.options()).transpose(1, 2);
}
// As they do for the gradient of a bias: each row has room for a multiple of 16.
Tensor empty_with_room(const Tensor& like) {
  auto sizes = like.sizes().vec();
  sizes.back() = (sizes.back() + 15) / 16 * 16;
  return at::empty(sizes, like.options()).narrow(-1, 0, like.size(-1));
}

// `out` and `lse` (the logarithm of the sum of exponentials, maybe padded) are computed, and the state is written.
void forward(const char* name, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, double p,
             bool causal, Scale scale, const Tensor& out, const Tensor& lse, const State& state) {
  std::optional<Draw> drawn;
  if (p > 0) drawn = draw(std::nullopt);
  Aliases aliases(c10::DeviceType::CPU);
  Attention a = on_host(aliases, q, k, v, bias, p, causal, scale);
  Tensor o = aliases.of(out), l = aliases.of(lse);
  State kept = state.of(aliases);
  std::vector<Range> ranges{range_of(a.q), range_of(a.k), range_of(a.v), range_of(o), range_of(l)};
  issue(name, std::move(ranges), [=]() mutable {
    std::pair<uint64_t, uint64_t> values;
    if (drawn) values = drawn->unpack();
    kept.write(values);
    auto scores = a.scores();
    if (l.size(-1) > 0) {
      l.fill_(std::numeric_limits<float>::infinity());
      l.narrow(-1, 0, scores.size(-2)).copy_(at::logsumexp(scores, -1));
    }
    auto weights = at::softmax(scores, -1);
    o.copy_(at::matmul(weights * a.dropout(weights, values), a.for_all_heads(a.v)));
  });
}

struct Gradients {
  Tensor q, k, v, bias;
};
void backward(const char* name, const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& bias, double p, bool causal, Scale scale, const State& state, const Gradients& into) {
  Aliases aliases(c10::DeviceType::CPU);
  Attention a = on_host(aliases, q, k, v, bias, p, causal, scale);
  State kept = state.of(aliases);
  Tensor g = aliases.of(grad);
  Gradients out{aliases.of(into.q), aliases.of(into.k), aliases.of(into.v), into.bias};
  if (out.bias.defined()) out.bias = aliases.of(out.bias);
  std::vector<Range> ranges;
  for (const Tensor& t : {a.q, a.k, a.v, g, out.q, out.k, out.v}) ranges.push_back(range_of(t));
  issue(name, std::move(ranges), [=]() mutable {
    std::pair<uint64_t, uint64_t> values;
    if (p > 0) values = kept.read();
    auto weights = at::softmax(a.scores(), -1);
    auto mask = a.dropout(weights, values), of_out = g.to(a.type());
    auto of_values = at::matmul((weights * mask).transpose(-2, -1), of_out);
    out.v.copy_(a.of_shared_heads(of_values, out.v.size(1)));
    auto of_weights = at::matmul(of_out, a.for_all_heads(a.v).transpose(-2, -1)) * mask;
    auto of_scores = weights * (of_weights - (of_weights * weights).sum(-1, true));
    if (out.bias.defined()) out.bias.copy_(of_scores.sum_to_size(out.bias.sizes()));
    out.q.copy_(at::matmul(of_scores, a.for_all_heads(a.k)) * a.scale);
    auto of_keys = at::matmul(of_scores.transpose(-2, -1), a.q.to(a.type())) * a.scale;
    out.k.copy_(a.of_shared_heads(of_keys, out.k.size(1)));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const std::optional<Tensor>& bias, bool with_lse, double p,
                                                     bool causal, Scale scale) {
  State state{on_device_of(at::kLong, {}), on_device_of(at::kLong, {})};
  const int64_t padded = with_lse ? (q.size(2) + 31) / 32 * 32 : 0;
  Tensor out = empty_by_length(q, v.size(-1));
  Tensor lse = at::empty({q.size(0), q.size(1), padded}, q.options().dtype(at::kFloat));
  forward("_scaled_dot_product_efficient_attention", q, k, v, bias.value_or(Tensor()), p, causal, scale, out, lse,
          state);
  return {out, lse, state.seed, state.offset};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor& seed, const Tensor& offset, double p, std::array<bool, 4> wanted, bool causal,
    Scale scale) {
  Gradients into{empty_by_length(q, q.size(-1)), empty_by_length(k, k.size(-1)), empty_by_length(v, v.size(-1)), {}};
  if (wanted[3] && bias.defined()) into.bias = empty_with_room(bias);
  backward("_scaled_dot_product_efficient_attention_backward", grad, q, k, v, bias, p, causal, scale, {seed, offset},
           into);
  return {into.q, into.k, into.v, into.bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal, bool, Scale scale) {
  Tensor state = on_device_of(at::kUInt64, {2}), unused = on_device_of(at::kUInt64, {});
  Tensor out = at::empty_like(q);
  Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  forward("_scaled_dot_product_flash_attention", q, k, v, {}, p, causal, scale, out, lse, {state, {}});
  return {out, lse, {}, {}, q.size(2), k.size(2), state, unused, at::empty({0}, q.options())};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, int64_t, int64_t, double p, bool causal,
                                                  const Tensor& state, const Tensor&, Scale scale) {
  Gradients into{at::empty_like(q), at::empty_like(k), at::empty_like(v), {}};
  backward("_scaled_dot_product_flash_attention_backward", grad, q, k, v, {}, p, causal, scale, {state, {}}, into);
  return {into.q, into.k, into.v};
}
} // namespace

void register_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  library.impl("_scaled_dot_product_flash_attention", torch::CppFunction(TORCH_FN(flash)));
  library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
}

} // namespace hostcuda::operators
