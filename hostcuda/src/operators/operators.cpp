// ATen's operators at CUDA's dispatch key, computed by their CPU kernels over the same bytes: run now, or recorded as
// a kernel node where the current stream captures. What allocates, views, copies bytes or waits stays torch's own.
// (The idea, and the shape of much of this file, is fxwrap's examples/hostsim/hostsim/csrc/fallback.cpp.)
#include "../hostcuda.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <sstream>
#include <unordered_map>

namespace {

using c10::IValue;
using torch::jit::Stack;

const std::set<std::string> kTakesCpuTensors{"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_pack_padded_sequence"};
const std::set<std::string> kProducts{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation", "aten::addmv", "aten::dot", "aten::_scaled_mm", "aten::addbmm", "aten::_int_mm"};
const std::set<std::string> kMetaDisagrees{"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
const std::set<std::string> kReturnsStatistics{"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update"};
const std::set<std::string> kDrawsWithoutGenerator{"aten::native_dropout"};

bool on_device(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

struct Quietly { // as a kernel runs: no autograd, no autocast, no modes of Python
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::PythonDispatcher})};
};

template <typename Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& t : value.toTensorVector()) result.push_back(t.defined() ? change(t) : t);
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      result.push_back(t && t->defined() ? std::optional<at::Tensor>(change(*t)) : std::nullopt);
    return result;
  }
  return value;
}
std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> result;
  with_tensors(value, [&](const at::Tensor& t) { result.push_back(t); return t; });
  return result;
}

at::Tensor make_view(c10::Storage storage, c10::DispatchKey key, const at::Tensor& geometry) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), geometry.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  result._set_conj(geometry.is_conj());
  result._set_neg(geometry.is_neg());
  if (geometry.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}
class Aliases {
 public:
  explicit Aliases(c10::DeviceType type) : type_(type) {}
  at::Tensor of(const at::Tensor& tensor) {
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      const bool meta = type_ == c10::DeviceType::Meta;
      void* data = meta ? nullptr : key->mutable_data();
      c10::Storage storage(c10::Storage::use_byte_size_t(), key->nbytes(), c10::DataPtr(data, c10::Device(type_)),
                           meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr, meta);
      found = storages_.emplace(key, std::move(storage)).first;
    }
    return make_view(found->second, type_ == c10::DeviceType::Meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU, tensor);
  }
 private:
  c10::DeviceType type_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

struct Range { const void* pointer; size_t bytes; };
Range range_of(const at::Tensor& t) {
  size_t bytes = t.numel() == 0 ? 0 : at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
  return {t.data_ptr(), bytes};
}
at::Tensor allocate_like(const at::Tensor& geometry) {
  auto options = at::TensorOptions().dtype(geometry.dtype()).device(c10::Device(c10::kCUDA, c10::cuda::current_device()));
  if (geometry.is_non_overlapping_and_dense()) return at::empty_strided(geometry.sizes(), geometry.strides(), options);
  return at::empty(geometry.sizes(), options);
}
at::Tensor copy_of(const at::Tensor& t) {
  at::Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

void issue(std::string name, std::vector<Range> ranges, std::function<void()> work) {
  auto stream = at::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(hostcuda::issue(stream, name, [name, ranges = std::move(ranges), work = std::move(work)] {
    for (auto& r : ranges) hostcuda::check_range(r.pointer, r.bytes, name.c_str());
    Quietly quietly;
    work();
  }));
}

// Numbers that follow from the CUDA generator's seed and offset, known when the work runs.
struct Draw {
  at::PhiloxCudaState state;
  std::pair<uint64_t, uint64_t> unpack() const {
    if (state.captured_) return {(uint64_t)*state.seed_.ptr, (uint64_t)(*state.offset_.ptr + state.offset_intragraph_)};
    return {state.seed_.val, state.offset_.val};
  }
};
Draw draw(const std::optional<at::Generator>& generator, uint64_t increment) {
  auto* gen = at::get_generator_or_default<at::CUDAGeneratorImpl>(generator, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(gen->mutex_);
  return {gen->philox_cuda_state(increment)};
}
at::Generator cpu_generator(uint64_t seed, uint64_t offset) {
  uint64_t h = seed * 0x9E3779B97F4A7C15ull ^ (offset + 0x7F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  h ^= h >> 31;
  return at::detail::createCPUGenerator(h);
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}
bool is_generator_type(const c10::TypePtr& type) { return type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())); }

std::atomic<bool> report_run_now{getenv("HOSTCUDA_TRACE_NOW") != nullptr};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), schema_(op.schema()), base_(op.operator_name().name), name_(c10::toString(op.operator_name())), arguments_(std::move(arguments)) {
    check_devices();
  }
  Stack run() {
    if (kProducts.count(base_)) at::cuda::getCurrentCUDABlasHandle(); // the real handle pool and workspaces
    if (returns_values()) return run_now("its result is a value on the host");
    if (kMetaDisagrees.count(base_)) return run_now("its meta kernel does not tell the shape");
    return defer();
  }

 private:
  void check_devices() {
    const bool takes_cpu = kTakesCpuTensors.count(base_);
    for (const IValue& argument : arguments_)
      for (const at::Tensor& t : tensors_in(argument))
        TORCH_CHECK(on_device(t) || takes_cpu || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ", t.device(), "! (", name_, ")");
  }
  bool returns_values() const {
    for (auto& r : schema_.returns()) if (!is_tensor_type(r.type())) return true;
    return false;
  }
  bool leaves_statistics_empty() const {
    const auto training = schema_.argumentIndexWithName("training");
    return kReturnsStatistics.count(base_) && !(training && arguments_[*training].toBool());
  }
  size_t returned_as(const c10::Argument& result) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const c10::AliasInfo* info = schema_.arguments()[i].alias_info();
      if (info && info->beforeSets() == result.alias_info()->beforeSets()) return i;
    }
    TORCH_CHECK(false, name_, " returns an alias of none of its arguments");
  }
  Stack cpu_arguments(std::vector<Range>* ranges, int* generator_at, std::optional<at::Generator>* generator) const {
    Aliases aliases(c10::DeviceType::CPU);
    Stack result;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_generator_type(schema_.arguments()[i].type())) {
        *generator_at = i;
        *generator = arguments_[i].toOptional<at::Generator>();
        result.emplace_back();
      } else if (arguments_[i].isDevice()) {
        result.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else {
        result.push_back(with_tensors(arguments_[i], [&](const at::Tensor& t) {
          if (!on_device(t)) return copy_of(t);
          at::Tensor alias = aliases.of(t);
          ranges->push_back(range_of(alias));
          return alias;
        }));
      }
    }
    return result;
  }
  std::optional<Stack> meta_results(Stack* meta_arguments, std::string* why_not) const {
    Aliases aliases(c10::DeviceType::Meta);
    for (const IValue& argument : arguments_) {
      if (argument.isDevice()) meta_arguments->emplace_back(c10::Device(c10::DeviceType::Meta));
      else if (argument.isGenerator()) meta_arguments->emplace_back();
      else meta_arguments->push_back(with_tensors(argument, [&](const at::Tensor& t) { return on_device(t) || t.dim() != 0 ? aliases.of(t) : t; }));
    }
    Stack stack = *meta_arguments;
    try {
      op_.callBoxed(&stack);
    } catch (const std::exception& error) {
      *why_not = error.what();
      return std::nullopt;
    }
    return stack;
  }
  void resize_outputs(const Stack& meta_arguments) {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!schema_.arguments()[i].is_out()) continue;
      const auto outputs = tensors_in(arguments_[i]), wanted = tensors_in(meta_arguments[i]);
      for (size_t j = 0; j < outputs.size(); ++j)
        if (outputs[j].sizes() != wanted[j].sizes()) {
          outputs[j].resize_(wanted[j].sizes());
          if (wanted[j].is_non_overlapping_and_dense()) outputs[j].unsafeGetTensorImpl()->set_sizes_and_strides(wanted[j].sizes(), wanted[j].strides());
        }
    }
  }
  Stack defer() {
    bool needs_meta = false;
    for (auto& a : schema_.arguments()) needs_meta = needs_meta || a.is_out();
    for (auto& r : schema_.returns()) needs_meta = needs_meta || r.alias_info() == nullptr;
    std::optional<Stack> geometry;
    if (needs_meta) {
      Stack meta_arguments;
      std::string why_not;
      geometry = meta_results(&meta_arguments, &why_not);
      if (!geometry) return run_now("the shape of its result is not known before it runs (" + why_not + ")");
      resize_outputs(meta_arguments);
    }
    std::vector<Range> ranges;
    Aliases aliases(c10::DeviceType::CPU);
    Stack results;
    std::vector<std::vector<at::Tensor>> copied_to;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const c10::Argument& result = schema_.returns()[i];
      copied_to.emplace_back();
      if (result.alias_info() != nullptr) { results.push_back(arguments_[returned_as(result)]); continue; }
      if (i > 0 && leaves_statistics_empty()) (*geometry)[i] = (*geometry)[i].toTensor().new_empty({0});
      results.push_back(with_tensors((*geometry)[i], allocate_like));
      for (const at::Tensor& t : tensors_in(results.back())) {
        copied_to.back().push_back(aliases.of(t));
        ranges.push_back(range_of(copied_to.back().back()));
      }
    }
    int generator_at = -1;
    std::optional<at::Generator> generator;
    Stack arguments = cpu_arguments(&ranges, &generator_at, &generator);
    std::optional<Draw> drawn;
    if (generator_at >= 0 || kDrawsWithoutGenerator.count(base_)) drawn = draw(generator, 4);
    issue(name_, std::move(ranges), [op = op_, name = name_, base = base_, arguments, copied_to, generator_at, drawn] {
      Stack stack = arguments;
      if (drawn) {
        auto [seed, offset] = drawn->unpack();
        auto gen = cpu_generator(seed, offset);
        if (generator_at >= 0) stack[generator_at] = gen;
        else if (base == "aten::native_dropout") {
          const at::Tensor input = stack[0].toTensor();
          const double p = stack[1].toDouble();
          const bool train = stack[2].isNone() || stack[2].toBool();
          at::Tensor mask = at::ones_like(input, at::kBool), output = input.clone();
          if (train && p > 0) {
            at::Tensor noise = at::empty(input.sizes(), at::TensorOptions().dtype(at::kFloat)).uniform_(0, 1, gen);
            mask = noise.ge(p);
            output = p < 1 ? input * mask * (1.0 / (1.0 - p)) : at::zeros_like(input);
          }
          copied_to[0][0].copy_(output);
          copied_to[1][0].copy_(mask);
          return;
        }
      }
      if (base == "aten::histc" && at::isIntegralType(stack[0].toTensor().scalar_type(), true)) { // the CPU has it for floats
        auto counts = at::histc(stack[0].toTensor().to(at::kFloat), stack[1].toInt(), stack[2].toScalar(), stack[3].toScalar());
        (stack.size() > 4 ? stack[4].toTensor() : copied_to[0][0]).copy_(counts);
        return;
      }
      op.callBoxed(&stack);
      for (size_t i = 0; i < copied_to.size(); ++i) {
        if (copied_to[i].empty()) continue;
        const auto computed = tensors_in(stack[i]);
        for (size_t j = 0; j < copied_to[i].size(); ++j) {
          TORCH_CHECK(j < computed.size() && computed[j].sizes() == copied_to[i][j].sizes(), name, ": meta kernel and CPU kernel disagree about the shape of result ", i);
          copied_to[i][j].copy_(computed[j]);
        }
      }
    });
    return results;
  }
  Stack run_now(const std::string& why) {
    if (report_run_now) fprintf(stderr, "hostcuda: %s runs at once: %s\n", name_.c_str(), why.substr(0, 200).c_str());
    C10_CUDA_CHECK(cudaStreamSynchronize(at::cuda::getCurrentCUDAStream()));
    std::vector<Range> ranges;
    int generator_at = -1;
    std::optional<at::Generator> generator;
    Stack stack = cpu_arguments(&ranges, &generator_at, &generator);
    if (generator_at >= 0) { auto [seed, offset] = draw(generator, 4).unpack(); stack[generator_at] = cpu_generator(seed, offset); }
    for (auto& r : ranges) hostcuda::check_range(r.pointer, r.bytes, name_.c_str());
    for (size_t i = 0; i < stack.size(); ++i)
      if (schema_.arguments()[i].is_out()) stack[i] = with_tensors(stack[i], [](const at::Tensor& o) { return at::empty({0}, o.options()); });
    { Quietly quietly; op_.callBoxed(&stack); }
    Aliases aliases(c10::DeviceType::CPU);
    auto copy_to_device = [&](const at::Tensor& computed, const at::Tensor& target) {
      at::Tensor alias = aliases.of(target);
      issue(name_ + " (result)", {range_of(alias)}, [alias, computed] { alias.copy_(computed); });
    };
    Stack results;
    for (size_t i = 0; i < stack.size(); ++i) {
      const c10::Argument& result = schema_.returns()[i];
      if (result.alias_info() == nullptr) {
        results.push_back(with_tensors(stack[i], [&](const at::Tensor& computed) {
          at::Tensor target = allocate_like(computed);
          copy_to_device(computed, target);
          return target;
        }));
        continue;
      }
      const size_t position = returned_as(result);
      results.push_back(arguments_[position]);
      if (schema_.arguments()[position].is_out()) {
        const auto outputs = tensors_in(arguments_[position]), computed = tensors_in(stack[i]);
        for (size_t j = 0; j < outputs.size(); ++j) {
          if (outputs[j].sizes() != computed[j].sizes()) outputs[j].resize_(computed[j].sizes());
          copy_to_device(computed[j], outputs[j]);
        }
      }
    }
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string base_, name_;
  Stack arguments_;
};

void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto last = torch::jit::last(*stack, count);
  Stack arguments(last.begin(), last.end());
  torch::jit::drop(*stack, count);
  Quietly quietly;
  Call call(op, std::move(arguments));
  for (IValue& result : call.run()) stack->push_back(std::move(result));
}

// -- copies: bytes by torch's own code, the rest as a kernel ----------------------------------------------------------

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_cuda() && src.is_cuda() && !self.is_same(src)) {
    const bool bytes = self.dtype() == src.dtype() && self.sizes() == src.sizes() && self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg() &&
        self.is_non_overlapping_and_dense() && self.strides() == src.strides();
    if (!bytes) {
      TORCH_CHECK(at::is_expandable_to(src.sizes(), self.sizes()), "The size of tensor a must match the size of tensor b in copy_");
      Aliases aliases(c10::DeviceType::CPU);
      at::Tensor to = aliases.of(self), from = aliases.of(src);
      issue("aten::copy_", {range_of(to), range_of(from)}, [to, from]() mutable { to.copy_(from); });
      return self;
    }
  }
  return at::native::copy_(self, src, non_blocking);
}
void foreach_copy_(at::TensorList self, at::TensorList src, bool non_blocking) {
  for (size_t i = 0; i < self.size(); ++i) { at::Tensor t = self[i]; t.copy_(src[i], non_blocking); }
}

// -- attention, as the mathematics --------------------------------------------------------------------------------------

struct Attention {
  at::Tensor q, k, v, bias;
  double scale, p;
  bool causal;
  at::Tensor for_all_heads(const at::Tensor& t) const { // heads of keys and values that several queries share
    auto f = t.to(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    return t.size(1) == q.size(1) ? f : f.repeat_interleave(q.size(1) / t.size(1), 1);
  }
  at::Tensor of_shared_heads(const at::Tensor& g, int64_t heads) const {
    return g.size(1) == heads ? g : g.reshape({g.size(0), heads, g.size(1) / heads, g.size(2), g.size(3)}).sum(2);
  }
  at::Tensor scores() const { // in float (or double)
    auto type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    auto s = at::matmul(q.to(type), for_all_heads(k).transpose(-2, -1)) * scale;
    if (bias.defined()) s = s + bias.to(type);
    if (causal) {
      auto mask = at::ones({q.size(-2), k.size(-2)}, at::TensorOptions().dtype(at::kBool)).tril();
      s = s.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
    }
    return s;
  }
  at::Tensor mask(const at::Tensor& like, uint64_t seed, uint64_t offset) const {
    if (p == 0) return at::ones_like(like);
    auto noise = at::empty(like.sizes(), like.options()).uniform_(0, 1, cpu_generator(seed, offset));
    return noise.ge(p).to(like.scalar_type()) / (1 - p);
  }
};
at::Tensor scalar_on_device(at::ScalarType type) { return at::empty({}, at::TensorOptions().dtype(type).device(at::kCUDA)); }
at::Tensor empty_bhsd(const at::Tensor& q, int64_t last) { // as the kernels lay it out: (batch, length, heads, size)
  return at::empty({q.size(0), q.size(2), q.size(1), last}, q.options()).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> forward_of(const char* name, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
    int64_t lse_length, double p, bool causal, std::optional<double> scale, const at::Tensor& seed, const at::Tensor& offset, bool like_query) {
  at::Tensor out = like_query ? at::empty_like(q) : empty_bhsd(q, v.size(-1)); // as the meta kernels say
  at::Tensor lse = at::empty({q.size(0), q.size(1), lse_length}, q.options().dtype(at::kFloat));
  std::optional<Draw> drawn;
  if (p > 0) drawn = draw(std::nullopt, 4);
  Aliases al(c10::DeviceType::CPU);
  Attention a{al.of(q), al.of(k), al.of(v), bias && bias->defined() ? al.of(*bias) : at::Tensor(), scale.value_or(1.0 / std::sqrt((double)q.size(-1))), p, causal};
  at::Tensor o = al.of(out), l = al.of(lse), s = seed.defined() ? al.of(seed) : seed, f = offset.defined() ? al.of(offset) : offset;
  std::vector<Range> ranges{range_of(a.q), range_of(a.k), range_of(a.v), range_of(o), range_of(l)};
  issue(name, ranges, [=]() mutable {
    uint64_t seed_value = 0, offset_value = 0;
    if (drawn) std::tie(seed_value, offset_value) = drawn->unpack();
    if (s.defined() && s.dim() == 0) { s.fill_((int64_t)seed_value); f.fill_((int64_t)offset_value); }
    else if (s.defined()) { s.view(at::kLong)[0].fill_((int64_t)seed_value); s.view(at::kLong)[1].fill_((int64_t)offset_value); }
    auto scores = a.scores();
    auto lse_value = at::logsumexp(scores, -1);
    if (l.size(-1) > 0) { l.fill_(std::numeric_limits<float>::infinity()); l.narrow(-1, 0, scores.size(-2)).copy_(lse_value); }
    auto weights = at::softmax(scores, -1);
    o.copy_(at::matmul(weights * a.mask(weights, seed_value, offset_value), a.for_all_heads(a.v)));
  });
  return {out, lse};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_of(const char* name, const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& bias, double p, bool causal, std::optional<double> scale, const at::Tensor& seed, const at::Tensor& offset, bool bias_grad, bool like_query) {
  auto make = [&](const at::Tensor& t) { return like_query ? at::empty_like(t) : empty_bhsd(t, t.size(-1)); };
  at::Tensor gq = make(q), gk = make(k), gv = make(v), gb;
  if (bias_grad && bias.defined()) gb = at::empty(bias.sizes(), bias.options());
  Aliases al(c10::DeviceType::CPU);
  Attention a{al.of(q), al.of(k), al.of(v), bias.defined() ? al.of(bias) : at::Tensor(), scale.value_or(1.0 / std::sqrt((double)q.size(-1))), p, causal};
  at::Tensor g = al.of(grad), s = seed.defined() && seed.is_cuda() ? al.of(seed) : seed, f = offset.defined() && offset.is_cuda() ? al.of(offset) : offset;
  at::Tensor oq = al.of(gq), ok = al.of(gk), ov = al.of(gv), ob = gb.defined() ? al.of(gb) : gb;
  issue(name, {range_of(a.q), range_of(a.k), range_of(a.v), range_of(g), range_of(oq), range_of(ok), range_of(ov)}, [=]() mutable {
    uint64_t seed_value = 0, offset_value = 0;
    if (p > 0) {
      if (s.dim() == 0) { seed_value = s.item<int64_t>(); offset_value = f.item<int64_t>(); }
      else { seed_value = s.view(at::kLong)[0].item<int64_t>(); offset_value = s.view(at::kLong)[1].item<int64_t>(); }
    }
    auto scores = a.scores();
    auto type = scores.scalar_type();
    auto weights = at::softmax(scores, -1), mask = a.mask(weights, seed_value, offset_value), gg = g.to(type);
    ov.copy_(a.of_shared_heads(at::matmul((weights * mask).transpose(-2, -1), gg), ov.size(1)));
    auto gw = at::matmul(gg, a.for_all_heads(a.v).transpose(-2, -1)) * mask;
    auto gs = weights * (gw - (gw * weights).sum(-1, true));
    if (ob.defined()) ob.copy_(gs.sum_to_size(ob.sizes()));
    oq.copy_(at::matmul(gs, a.for_all_heads(a.k)) * a.scale);
    ok.copy_(a.of_shared_heads(at::matmul(gs.transpose(-2, -1), a.q.to(type)) * a.scale, ok.size(1)));
  });
  return {gq, gk, gv, gb};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
    bool with_lse, double p, bool causal, std::optional<double> scale) {
  at::Tensor seed = scalar_on_device(at::kLong), offset = scalar_on_device(at::kLong);
  auto [out, lse] = forward_of("_scaled_dot_product_efficient_attention", q, k, v, bias, with_lse ? (q.size(2) + 31) / 32 * 32 : 0, p, causal, scale, seed, offset, false);
  return {out, lse, seed, offset};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    const at::Tensor&, const at::Tensor&, const at::Tensor& seed, const at::Tensor& offset, double p, std::array<bool, 4> mask, bool causal, std::optional<double> scale) {
  return backward_of("_scaled_dot_product_efficient_attention_backward", grad, q, k, v, bias, p, causal, scale, seed, offset, mask[3], false);
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    double p, bool causal, bool, std::optional<double> scale) {
  at::Tensor state = at::empty({2}, at::TensorOptions().dtype(at::kUInt64).device(at::kCUDA)), unused = at::empty({}, at::TensorOptions().dtype(at::kUInt64).device(at::kCUDA));
  auto [out, lse] = forward_of("_scaled_dot_product_flash_attention", q, k, v, std::nullopt, q.size(2), p, causal, scale, state, at::Tensor(), true);
  return {out, lse, at::Tensor(), at::Tensor(), q.size(2), k.size(2), state, unused, at::empty({0}, q.options())};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, int64_t, int64_t, double p, bool causal, const at::Tensor& state, const at::Tensor&, std::optional<double> scale) {
  auto [a, b, c, d] = backward_of("_scaled_dot_product_flash_attention_backward", grad, q, k, v, at::Tensor(), p, causal, scale, state, at::Tensor(), false, true);
  return {a, b, c};
}

std::vector<std::unique_ptr<torch::Library>> libraries;

} // namespace

// `names`: operators of ATen, one a line. Returns how many were taken over.
extern "C" __attribute__((visibility("default"))) int hostcuda_override(const char* names) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream lines(names);
  int count = 0;
  for (std::string name; std::getline(lines, name); ++count)
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  library->impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library->impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  library->impl("_scaled_dot_product_flash_attention", torch::CppFunction(TORCH_FN(flash)));
  library->impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  libraries.push_back(std::move(library));
  return count;
}
