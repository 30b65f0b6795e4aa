#include "fallback.h"

#include "aliases.h"
#include "capture.h"
#include "devices.h"
#include "faults.h"
#include "generator.h"
#include "name.h"
#include "python.h"
#include "rules.h"
#include "streams.h"
#include "workspace.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace backend {

namespace {

using c10::IValue;
using torch::jit::Stack;

// Operators that take CPU tensors of more than one element next to those of the device.
constexpr std::array kTakesCpuTensors{"aten::index", "aten::_index_put_impl_", "aten::_pack_padded_sequence"};

// Operators that split their sums into parts, and need memory for those.
constexpr std::array kProducts{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
constexpr std::chrono::microseconds kBetween(200);

// Operators whose meta kernel gives some results another shape than the CPU kernel does.
constexpr std::array kMetaDisagrees{"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};

// Operators that return a batch's statistics beside their result: the CPU kernels in training only, the meta kernels
// always.
constexpr std::array kReturnsStatistics{
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_no_update"};

template <size_t count>
bool is_one_of(const c10::OperatorHandle& op, const std::array<const char*, count>& names) {
  return std::find(names.begin(), names.end(), op.operator_name().name) != names.end();
}

bool is_device_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// Calls `change` for every tensor of a value and builds the value again from what it returns.
template <typename Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      result.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      result.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return result;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> result;
  with_tensors(value, [&](const at::Tensor& tensor) {
    result.push_back(tensor);
    return tensor;
  });
  return result;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::ofTensor()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_generator_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
}

// A CPU operand is taken by value: the program may change it before the work runs.
at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// A library's handle for this thread, made when it is needed first.
void make_library_handle(const std::string& name, const c10::Stream& stream) {
  thread_local bool made = false;
  if (!made && in_force(Rule::kLibrariesBeginOutsideOfCaptures)) {
    const std::string what = "making a library's handle ('" + name + "')";
    const auto capture = capture_of(stream);
    if (capture && capture->mode() == GraphCaptureMode::Relaxed) {
      check_host_may_wait(HostWait::kSynchronize, what);
    } else {
      check_host_may_wait(HostWait::kSynchronize, what, stream);
    }
  }
  made = true;
}

// One call of an operator on this device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), schema_(op.schema()), name_(c10::toString(op.operator_name())), arguments_(std::move(arguments)) {
    find_device();
  }

  c10::DeviceIndex device() const {
    return device_;
  }

  Stack run();

 private:
  void find_device();
  void check_same_device(bool same, const at::Tensor& tensor) const;
  bool returns_values() const;
  bool returns_views() const;
  bool leaves_statistics_empty() const;
  size_t argument_returned_as(const c10::Argument& result) const;

  // The arguments for the CPU kernel, over the same memory; fills in what the work has to say about itself.
  Stack cpu_arguments(Work* work) const;
  std::optional<Stack> meta_results(Stack* meta_arguments, std::string* why_not) const;

  Stack make_views();
  Stack defer();
  Stack run_now(const std::string& why);
  void resize_outputs(const Stack& meta_arguments);

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack arguments_;
  c10::DeviceIndex device_ = -1;
};

void Call::check_same_device(bool same, const at::Tensor& tensor) const {
  TORCH_CHECK(
      same,
      name_,
      ": expected all tensors to be on the same device, but found ",
      DEVICE_NAME ":",
      static_cast<int>(device_),
      " and ",
      tensor.device());
}

void Call::find_device() {
  const bool takes_cpu_tensors = is_one_of(op_, kTakesCpuTensors);
  for (const IValue& argument : arguments_) {
    for (const at::Tensor& tensor : tensors_in(argument)) {
      if (is_device_tensor(tensor)) {
        check_same_device(device_ == -1 || device_ == tensor.device().index(), tensor);
        device_ = tensor.device().index();
      }
    }
  }
  for (const IValue& argument : arguments_) {
    for (const at::Tensor& tensor : tensors_in(argument)) {
      check_same_device(is_device_tensor(tensor) || device_ == -1 || takes_cpu_tensors || tensor.dim() == 0, tensor);
    }
    if (device_ == -1 && argument.isDevice()) {
      device_ = checked_device(argument.toDevice().index());
    }
  }
  device_ = checked_device(device_);
}

bool Call::returns_values() const {
  for (const c10::Argument& result : schema_.returns()) {
    if (!is_tensor_type(result.type())) {
      return true;
    }
  }
  return false;
}

bool Call::returns_views() const {
  for (const c10::Argument& result : schema_.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool Call::leaves_statistics_empty() const {
  const auto training = schema_.argumentIndexWithName("training");
  return is_one_of(op_, kReturnsStatistics) && !(training && arguments_[*training].toBool());
}

size_t Call::argument_returned_as(const c10::Argument& result) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::AliasInfo* info = schema_.arguments()[i].alias_info();
    if (info != nullptr && info->beforeSets() == result.alias_info()->beforeSets()) {
      return i;
    }
  }
  TORCH_CHECK(false, name_, " returns an alias of none of its arguments");
}

Stack Call::cpu_arguments(Work* work) const {
  Aliases aliases(c10::DeviceType::CPU);
  Stack result;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool written = is_written(schema_.arguments()[i]);
    if (is_generator_type(schema_.arguments()[i].type())) {
      work->generator = checked_generator(arguments_[i].toOptional<at::Generator>(), device_);
      result.emplace_back(cpu_generator(*work->generator));
    } else if (arguments_[i].isDevice()) {
      result.emplace_back(c10::Device(c10::DeviceType::CPU));
    } else {
      result.push_back(with_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        if (!is_device_tensor(tensor)) {
          return written ? tensor : copy_of(tensor);
        }
        at::Tensor alias = aliases.of(tensor);
        work->memory.push_back(range_of(alias, written));
        return alias;
      }));
    }
  }
  return result;
}

std::optional<Stack> Call::meta_results(Stack* meta_arguments, std::string* why_not) const {
  Aliases aliases(c10::DeviceType::Meta);
  for (const IValue& argument : arguments_) {
    if (argument.isDevice()) {
      meta_arguments->emplace_back(c10::Device(c10::DeviceType::Meta));
    } else if (argument.isGenerator()) {
      meta_arguments->emplace_back();
    } else {
      meta_arguments->push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
        // A number stays one: type promotion treats it in its own way.
        return is_device_tensor(tensor) || tensor.dim() != 0 ? aliases.of(tensor) : tensor;
      }));
    }
  }
  Stack stack = *meta_arguments;
  try {
    op_.callBoxed(&stack);
  } catch (...) {
    *why_not = describe_current_exception();
    return std::nullopt;
  }
  return stack;
}

// A view has the geometry that its meta kernel computes, over the same storage.
Stack Call::make_views() {
  Stack meta_arguments;
  std::string why_not;
  auto results = meta_results(&meta_arguments, &why_not);
  TORCH_CHECK(results, name_, ": ", why_not);
  for (size_t i = 0; i < results->size(); ++i) {
    const c10::Argument& result = schema_.returns()[i];
    if (result.alias_info() == nullptr) {
      continue;
    }
    const at::Tensor base = tensors_in(arguments_[argument_returned_as(result)]).at(0);
    (*results)[i] = with_tensors(
        (*results)[i], [&](const at::Tensor& geometry) { return view_like(base, geometry); });
  }
  return std::move(*results);
}

// Outputs given by the caller get the size that the operator would give them, before the work is bound to addresses.
void Call::resize_outputs(const Stack& meta_arguments) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out()) {
      continue;
    }
    const auto outputs = tensors_in(arguments_[i]);
    const auto wanted = tensors_in(meta_arguments[i]);
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (outputs[j].sizes() != wanted[j].sizes()) {
        outputs[j].resize_(wanted[j].sizes());
        if (wanted[j].is_non_overlapping_and_dense()) {
          outputs[j].unsafeGetTensorImpl()->set_sizes_and_strides(wanted[j].sizes(), wanted[j].strides());
        }
      }
    }
  }
}

Stack Call::run() {
  if (returns_values()) {
    return run_now("its result is a value on the host");
  }
  if (returns_views()) {
    return make_views();
  }
  if (is_one_of(op_, kMetaDisagrees)) {
    return run_now("its meta kernel does not tell the shape of what its CPU kernel returns");
  }
  return defer();
}

Stack Call::defer() {
  bool needs_meta = false;
  for (const c10::Argument& argument : schema_.arguments()) {
    needs_meta = needs_meta || argument.is_out();
  }
  for (const c10::Argument& result : schema_.returns()) {
    needs_meta = needs_meta || result.alias_info() == nullptr;
  }
  std::optional<Stack> geometry;
  if (needs_meta) {
    Stack meta_arguments;
    std::string why_not;
    geometry = meta_results(&meta_arguments, &why_not);
    if (!geometry) {
      return run_now("the shape of its result is not known before it runs (" + why_not + ")");
    }
    resize_outputs(meta_arguments);
  }

  Work work{name_, {}};
  Aliases aliases(c10::DeviceType::CPU);
  Stack results;
  std::vector<std::vector<at::Tensor>> copied_to; // For every result of the kernel, where its tensors go.
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < schema_.returns().size(); ++i) {
    const c10::Argument& result = schema_.returns()[i];
    copied_to.emplace_back();
    if (result.alias_info() != nullptr) {
      results.push_back(arguments_[argument_returned_as(result)]);
      for (const at::Tensor& tensor : tensors_in(results.back())) {
        sums.push_back(aliases.of(tensor));
      }
      continue;
    }
    if (i > 0 && leaves_statistics_empty()) {
      (*geometry)[i] = (*geometry)[i].toTensor().new_empty({0});
    }
    results.push_back(with_tensors((*geometry)[i], allocate_like));
    for (const at::Tensor& tensor : tensors_in(results.back())) {
      copied_to.back().push_back(aliases.of(tensor));
      work.memory.push_back(range_of(copied_to.back().back(), true));
      sums.push_back(copied_to.back().back());
    }
  }
  const c10::Stream stream = current_stream(device_);
  std::vector<at::Tensor> parts;
  if (is_one_of(op_, kProducts)) {
    make_library_handle(name_, stream);
    if (asynchronous() && in_force(Rule::kWorkspaceBelongsToThreadAndStream)) {
      parts = in_workspace(sums, stream);
    }
  }
  work.run = [op = op_, name = name_, arguments = cpu_arguments(&work), copied_to = std::move(copied_to), sums, parts] {
    KernelGuard guard;
    Stack stack = arguments;
    op.callBoxed(&stack);
    for (size_t i = 0; i < copied_to.size(); ++i) {
      if (copied_to[i].empty()) {
        continue;
      }
      const auto computed = tensors_in(stack[i]);
      for (size_t j = 0; j < copied_to[i].size(); ++j) {
        TORCH_CHECK(
            j < computed.size() && computed[j].sizes() == copied_to[i][j].sizes(),
            name,
            ": its meta kernel and its CPU kernel disagree about the shape of result ",
            i);
        copied_to[i][j].copy_(computed[j]);
      }
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].copy_(sums[i]);
      sums[i].zero_();
    }
  };
  issue(stream, std::move(work));
  if (!parts.empty()) {
    Work sum{name_ + " (sum of its parts)", {}};
    for (const at::Tensor& tensor : sums) {
      sum.memory.push_back(range_of(tensor, true));
    }
    sum.run = [sums, parts] {
      KernelGuard guard;
      std::this_thread::sleep_for(kBetween); // For whoever may come between to do so.
      for (size_t i = 0; i < parts.size(); ++i) {
        sums[i].copy_(parts[i]);
      }
    };
    issue(stream, std::move(sum));
  }
  return results;
}

Stack Call::run_now(const std::string& why) {
  const c10::Stream stream = current_stream(device_);
  check_host_may_wait(HostWait::kRead, "'" + name_ + "' (" + why + ")", stream);
  queue_of(stream).wait();

  Work work{name_, {}};
  Stack stack = cpu_arguments(&work);
  for (size_t i = 0; i < stack.size(); ++i) {
    if (schema_.arguments()[i].is_out()) {
      // The kernel may give it any size: it gets one that can grow, and the result is copied.
      stack[i] = with_tensors(
          stack[i], [](const at::Tensor& output) { return at::empty({0}, output.options()); });
    }
  }
  op_.callBoxed(&stack);

  const auto copy_to_device = [&](const at::Tensor& computed, const at::Tensor& target) {
    Aliases aliases(c10::DeviceType::CPU);
    at::Tensor alias = aliases.of(target);
    issue(stream, {name_ + " (result)", [alias, computed] {
                     KernelGuard guard;
                     alias.copy_(computed);
                   }, {range_of(alias, true)}});
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
    const size_t position = argument_returned_as(result);
    results.push_back(arguments_[position]);
    if (schema_.arguments()[position].is_out()) {
      const auto outputs = tensors_in(arguments_[position]);
      const auto computed = tensors_in(stack[i]);
      for (size_t j = 0; j < outputs.size(); ++j) {
        if (outputs[j].sizes() != computed[j].sizes()) {
          outputs[j].resize_(computed[j].sizes());
        }
        copy_to_device(computed[j], outputs[j]);
      }
    }
  }
  return results;
}

} // namespace

KernelGuard::KernelGuard()
    : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

void run_on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto last = torch::jit::last(*stack, count);
  Stack arguments(last.begin(), last.end());
  torch::jit::drop(*stack, count);
  KernelGuard kernel_guard;
  Call call(op, std::move(arguments));
  OnDevice device_guard(call.device());
  for (IValue& result : call.run()) {
    stack->push_back(std::move(result));
  }
}

} // namespace backend

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&backend::run_on_device>());
}
