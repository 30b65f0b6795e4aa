// A boxed call of an operator on tensors of the device: results are allocated by what the meta kernel says, and the
// CPU's kernel computes them when the work runs. (The idea is that of fxwrap's examples/hostsim.)
#include "call.h"

#include <ATen/TensorIterator.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/native/ConvUtils.h>
#include <c10/cuda/CUDAException.h>

#include <cstdlib>
#include <set>

// torch's own handle with a workspace, where torch has that function (2.15): then it is chosen, as templates come second.
namespace otherwise {
template <typename... None> cublasHandle_t getCurrentCUDABlasHandleWithWorkspace(None...) {
  return at::cuda::getCurrentCUDABlasHandle();
}
} // namespace otherwise
namespace in_torch {
using namespace at::cuda;
using namespace otherwise;
static auto handle() { return getCurrentCUDABlasHandleWithWorkspace(); }
} // namespace in_torch

namespace hostcuda::operators {

namespace {
using Names = std::set<std::string>;
const Names kTakesCpuTensors{"aten::index", "aten::_index_put_impl_", "aten::index_put_",
                             "aten::_pack_padded_sequence"};
const Names kProducts{"aten::mm",   "aten::addmm", "aten::bmm",        "aten::baddbmm", "aten::_addmm_activation",
                      "aten::addmv", "aten::dot",   "aten::_scaled_mm", "aten::addbmm",  "aten::_int_mm"};
const Names kMetaDisagrees{"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
// CUDA's kernels return no statistics in evaluation.
const Names kReturnsStatistics{"aten::native_batch_norm", "aten::_native_batch_norm_legit",
                               "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update"};
const Names kDrawsWithoutGenerator{"aten::native_dropout"};
const Names kConvolutions{"aten::convolution", "aten::convolution_backward"};

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}
bool is_generator_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
}

// What the CPU has no kernel for, or one that draws from no generator of ours.
bool special(const std::string& base, const Stack& arguments, const std::vector<std::vector<at::Tensor>>& results,
             const std::optional<at::Generator>& generator) {
  if (base == "aten::native_dropout") {
    const at::Tensor input = arguments[0].toTensor();
    const double p = arguments[1].toDouble();
    const bool train = arguments[2].isNone() || arguments[2].toBool();
    at::Tensor mask = at::ones_like(input, at::kBool), output = input.clone();
    if (train && p > 0) {
      auto options = at::TensorOptions().dtype(at::kFloat);
      mask = at::empty(input.sizes(), options).uniform_(0, 1, generator).ge(p);
      output = p < 1 ? input * mask * (1.0 / (1.0 - p)) : at::zeros_like(input);
    }
    results[0][0].copy_(output);
    results[1][0].copy_(mask);
    return true;
  }
  if (base == "aten::histc" && at::isIntegralType(arguments[0].toTensor().scalar_type(), true)) {
    auto counts = at::histc(arguments[0].toTensor().to(at::kFloat), arguments[1].toInt(), arguments[2].toScalar(),
                            arguments[3].toScalar());
    (arguments.size() > 4 ? arguments[4].toTensor() : results[0][0]).copy_(counts);
    return true;
  }
  return false;
}
} // namespace

Call::Call(const c10::OperatorHandle& op, Stack arguments)
    : op_(op),
      schema_(op.schema()),
      base_(op.operator_name().name),
      name_(c10::toString(op.operator_name())),
      arguments_(std::move(arguments)) {
  const bool takes_cpu = kTakesCpuTensors.count(base_);
  for (const IValue& argument : arguments_)
    for (const at::Tensor& t : tensors_in(argument))
      TORCH_CHECK(on_device(t) || takes_cpu || t.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                  t.device(), "! (", name_, ")");
}

// Lists as those of `_foreach_add_`, which torch's own code goes through one by one: numbers on the host are among them.
bool Call::is_written_list(size_t argument) const {
  const c10::AliasInfo* info = schema_.arguments()[argument].alias_info();
  return info && info->isWrite() && arguments_[argument].isTensorList() && !schema_.arguments()[argument].is_out();
}
bool Call::writes_to_host() const {
  for (size_t i = 0; i < arguments_.size(); ++i)
    if (is_written_list(i))
      for (const at::Tensor& t : tensors_in(arguments_[i]))
        if (!on_device(t)) return true;
  return false;
}

Stack Call::run() {
  std::optional<decltype(in_torch::handle())> handle; // the real handle pool and workspaces
  if (kProducts.count(base_)) handle.emplace(in_torch::handle());
  if (returns_values()) return run_now("its result is a value on the host");
  if (writes_to_host()) return run_now("it writes to a tensor on the host");
  if (kMetaDisagrees.count(base_)) return run_now("its meta kernel does not tell the shape");
  return defer();
}

bool Call::returns_values() const {
  for (auto& result : schema_.returns())
    if (!is_tensor_type(result.type())) return true;
  return false;
}
bool Call::leaves_statistics_empty() const {
  const auto training = schema_.argumentIndexWithName("training");
  return kReturnsStatistics.count(base_) && !(training && arguments_[*training].toBool());
}
size_t Call::returned_as(const c10::Argument& result) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::AliasInfo* info = schema_.arguments()[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  TORCH_CHECK(false, name_, " returns an alias of none of its arguments");
}

Call::OnHost Call::on_host() const {
  OnHost here;
  Aliases aliases(c10::DeviceType::CPU);
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (is_generator_type(schema_.arguments()[i].type())) {
      here.generator_at = i;
      here.generator = arguments_[i].toOptional<at::Generator>();
      here.arguments.emplace_back();
    } else if (arguments_[i].isDevice()) {
      here.arguments.emplace_back(c10::Device(c10::DeviceType::CPU));
    } else {
      here.arguments.push_back(with_tensors(arguments_[i], [&](const at::Tensor& t) {
        if (!on_device(t)) return is_written_list(i) ? t : copy_of(t);
        at::Tensor alias = aliases.of(t);
        here.ranges.push_back(range_of(alias));
        return alias;
      }));
    }
  }
  return here;
}

std::optional<Stack> Call::meta_results(Stack* meta_arguments, std::string* why_not) const {
  Aliases aliases(c10::DeviceType::Meta);
  auto to_meta = [&](const at::Tensor& t) { return on_device(t) || t.dim() != 0 ? aliases.of(t) : t; };
  for (const IValue& argument : arguments_) {
    if (argument.isDevice()) meta_arguments->emplace_back(c10::Device(c10::DeviceType::Meta));
    else if (argument.isGenerator()) meta_arguments->emplace_back();
    else meta_arguments->push_back(with_tensors(argument, to_meta));
  }
  Stack stack = *meta_arguments;
  try {
    op_.callBoxed(&stack);
  } catch (const std::exception& error) {
    *why_not = error.what();
    return std::nullopt;
  }
  if (kConvolutions.count(base_)) lay_out_convolution(&stack);
  return stack;
}
// A convolution's layout follows from the device, its settings and the layouts of both inputs, of which the meta kernel
// knows only the last. FakeTensor asks torch for it, too (torch/_subclasses/fake_impls.py, conv): what is compiled
// relies on the same answer.
void Call::lay_out_convolution(Stack* results) const {
  auto argument = [&](const char* name) { return arguments_[*schema_.argumentIndexWithName(name)]; };
  auto sizes = [&](const char* name) { return argument(name).toSymIntVector(); };
  at::Tensor input = argument("input").toTensor(), weight = argument("weight").toTensor();
  if (input.dim() < weight.dim()) return; // no batch: contiguous, as the meta kernel says
  std::optional<at::Tensor> bias;
  std::optional<std::vector<c10::SymInt>> bias_sizes;
  if (auto at = schema_.argumentIndexWithName("bias")) bias = arguments_[*at].toOptional<at::Tensor>();
  auto at = schema_.argumentIndexWithName("bias_sizes");
  if (at && !arguments_[*at].isNone()) bias_sizes = sizes("bias_sizes");
  const auto backend = at::native::select_conv_backend(
      input, weight, bias, sizes("stride"), sizes("padding"), sizes("dilation"), argument("transposed").toBool(),
      sizes("output_padding"), argument("groups").toSymInt(),
      bias_sizes ? at::OptionalSymIntArrayRef(*bias_sizes) : at::OptionalSymIntArrayRef());
  const bool of_lines = weight.dim() == 3; // torch computes them as images of one line
  if (of_lines) input = input.contiguous().unsqueeze(2), weight = weight.unsqueeze(2);
  const auto format = at::native::_determine_backend_memory_format(input, weight, backend);
  for (IValue& result : *results)
    result = with_tensors(result, [&](const at::Tensor& t) {
      if (t.dim() != arguments_.front().toTensor().dim()) return t; // of the bias
      auto shape = t.sizes().vec();
      if (of_lines) shape.insert(shape.begin() + 2, 1);
      at::Tensor laid_out = at::empty(shape, t.options().memory_format(format));
      return of_lines ? laid_out.squeeze(2) : laid_out;
    });
}
// As TensorIterator lays out what it computes from these arguments. Of `out=`, meta kernels in Python say contiguous.
at::Tensor Call::iterated(const Stack& meta_arguments, const at::Tensor& like) const {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).check_all_same_device(false).add_owned_output(at::Tensor());
  config.declare_static_dtype_and_device(like.scalar_type(), like.device());
  for (size_t i = 0; i < meta_arguments.size(); ++i)
    if (!schema_.arguments()[i].is_out())
      for (const at::Tensor& t : tensors_in(meta_arguments[i])) config.add_owned_const_input(t);
  at::Tensor result = config.build().output(0);
  return result.sizes() == like.sizes() ? result : like;
}
void Call::resize_outputs(const Stack& meta_arguments) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out()) continue;
    const auto outputs = tensors_in(arguments_[i]), wanted = tensors_in(meta_arguments[i]);
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (outputs[j].sizes() == wanted[j].sizes()) continue;
      outputs[j].resize_(wanted[j].sizes());
      const at::Tensor shape = op_.hasTag(at::Tag::pointwise) ? iterated(meta_arguments, wanted[j]) : wanted[j];
      if (shape.is_non_overlapping_and_dense())
        outputs[j].unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    }
  }
}

Stack Call::defer() {
  bool needs_meta = false;
  for (auto& argument : schema_.arguments()) needs_meta = needs_meta || argument.is_out();
  for (auto& result : schema_.returns()) needs_meta = needs_meta || result.alias_info() == nullptr;
  std::optional<Stack> geometry;
  if (needs_meta) {
    Stack meta_arguments;
    std::string why_not;
    geometry = meta_results(&meta_arguments, &why_not);
    if (!geometry) return run_now("the shape of its result is not known before it runs (" + why_not + ")");
    resize_outputs(meta_arguments);
  }
  Aliases aliases(c10::DeviceType::CPU);
  Stack results;
  std::vector<std::vector<at::Tensor>> targets; // of each result: what the kernel's result is copied to
  std::vector<Range> result_ranges;
  for (size_t i = 0; i < schema_.returns().size(); ++i) {
    const c10::Argument& result = schema_.returns()[i];
    targets.emplace_back();
    if (result.alias_info() != nullptr) {
      results.push_back(arguments_[returned_as(result)]);
      continue;
    }
    if (i > 0 && leaves_statistics_empty()) (*geometry)[i] = (*geometry)[i].toTensor().new_empty({0});
    results.push_back(with_tensors((*geometry)[i], allocate_like));
    for (const at::Tensor& t : tensors_in(results.back())) {
      targets.back().push_back(aliases.of(t));
      result_ranges.push_back(range_of(targets.back().back()));
    }
  }
  OnHost here = on_host();
  here.ranges.insert(here.ranges.end(), result_ranges.begin(), result_ranges.end());
  std::optional<Draw> drawn;
  if (here.generator_at >= 0 || kDrawsWithoutGenerator.count(base_)) drawn = draw(here.generator);
  auto compute = [op = op_, name = name_, base = base_, arguments = std::move(here.arguments), targets, drawn,
                  generator_at = here.generator_at] {
    Stack stack = arguments;
    std::optional<at::Generator> generator;
    if (drawn) generator = cpu_generator(drawn->unpack());
    if (generator_at >= 0) stack[generator_at] = *generator;
    if (special(base, stack, targets, generator)) return;
    op.callBoxed(&stack);
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].empty()) continue;
      const auto computed = tensors_in(stack[i]);
      for (size_t j = 0; j < targets[i].size(); ++j) {
        TORCH_CHECK(j < computed.size() && computed[j].sizes() == targets[i][j].sizes(), name,
                    ": meta kernel and CPU kernel disagree about the shape of result ", i);
        targets[i][j].copy_(computed[j]);
      }
    }
  };
  issue(name_, std::move(here.ranges), std::move(compute));
  return results;
}

Stack Call::run_now(const std::string& why) {
  static const bool report = getenv("HOSTCUDA_TRACE_NOW") != nullptr;
  if (report) fprintf(stderr, "hostcuda: %s runs at once: %s\n", name_.c_str(), why.substr(0, 200).c_str());
  C10_CUDA_CHECK(cudaStreamSynchronize(at::cuda::getCurrentCUDAStream()));
  OnHost here = on_host();
  Stack& stack = here.arguments;
  if (here.generator_at >= 0) stack[here.generator_at] = cpu_generator(draw(here.generator).unpack());
  for (auto& range : here.ranges) check_range(range.pointer, range.bytes, name_.c_str());
  for (size_t i = 0; i < stack.size(); ++i)
    if (schema_.arguments()[i].is_out())
      stack[i] = with_tensors(stack[i], [](const at::Tensor& out) { return at::empty({0}, out.options()); });
  {
    Quietly quietly;
    op_.callBoxed(&stack);
  }
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
    if (!schema_.arguments()[position].is_out()) continue;
    const auto outputs = tensors_in(arguments_[position]), computed = tensors_in(stack[i]);
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (outputs[j].sizes() != computed[j].sizes()) outputs[j].resize_(computed[j].sizes());
      copy_to_device(computed[j], outputs[j]);
    }
  }
  return results;
}

} // namespace hostcuda::operators
