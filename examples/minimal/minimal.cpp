// A device with memory, copies and graphs, and no operator of its own: the CPU's run, on the same memory.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fstream>
#include <functional>

namespace minimal {

using torch::jit::Stack;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Streams have numbers, and order nothing: work runs when it is issued. A capture belongs to a stream.
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams{0};

using Memory = std::shared_ptr<void>;
struct Capture {
  c10::StreamId stream;
  c10::MempoolId_t pool;
  std::vector<std::function<void()>> work;
  std::vector<Memory> memory; // What was allocated stays where it is.
  at::Tensor generator; // What the CPU's generator was before: a draw that is captured is none yet.
  std::string failure;
};
std::shared_ptr<Capture> under_way; // One at a time.

Capture* capture() {
  return under_way && under_way->stream == current_stream ? under_way.get() : nullptr;
}

void refuse_in_capture(const std::string& what) {
  if (auto* here = capture()) {
    here->failure = what + " reads a value on the host, or copies from or to it: not while capturing";
    TORCH_CHECK(false, here->failure);
  }
}

// Memory --------------------------------------------------------------------------------------------------------------

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Memory memory(std::aligned_alloc(64, (bytes / 64 + 1) * 64), std::free);
    if (auto* here = capture()) {
      here->memory.push_back(memory);
    }
    return {memory.get(), new Memory(memory), [](void* held) { delete static_cast<Memory*>(held); }, {kDevice, 0}};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// Operators -----------------------------------------------------------------------------------------------------------

at::Tensor view_of(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  view._set_conj(like.is_conj());
  view._set_neg(like.is_neg());
  return view;
}

// The same elements for the CPU's operators; of what is no element yet, a tensor that may grow. A number, which is a
// tensor on the CPU, may change before captured work runs: a copy.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor.defined() && capture() ? tensor.clone() : tensor;
  }
  if (tensor.numel() == 0) {
    return at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
  }
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.unsafeGetStorageImpl()->mutable_data(), c10::kCPU);
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  return view_of(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

// Captured work has not run: what it will return is found out on zeros, which are indices, too.
at::Tensor zeros(const at::Tensor& tensor) {
  const auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  std::memset(made.storage().mutable_data(), 0, made.storage().nbytes());
  return made;
}

// A value with its tensors changed.
template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor() && value.toTensor().defined()) {
    return change(value.toTensor());
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) {
    return value;
  }
  auto changed = value.toList().copy();
  for (size_t i = 0; i < changed.size(); ++i) {
    changed.set(i, with_tensors(changed.get(i), change));
  }
  return changed;
}

// Run work now, or record it.
void issue(std::function<void()> work) {
  capture() ? capture()->work.push_back(std::move(work)) : work();
}

at::Tensor copy(const at::Tensor& source, const at::Tensor& target, bool) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!source.is_privateuseone() || !target.is_privateuseone()) {
    refuse_in_capture("a copy");
  }
  issue([from = on_cpu(source), to = on_cpu(target)] { to.copy_(from); });
  return target;
}

// Every operator that has no other kernel here: the CPU's. What it returns is an operand, a view of one, or new.
void run(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = op.schema();
  const auto on_host = [](const c10::Argument& result) {
    return !result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->kind() != c10::TypeKind::ListType;
  };
  const auto is_viewed = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
  };
  const bool view = std::any_of(schema.arguments().begin(), schema.arguments().end(), is_viewed);
  if (op.hasTag(at::Tag::dynamic_output_shape) ||
      std::any_of(schema.returns().begin(), schema.returns().end(), on_host)) {
    refuse_in_capture(schema.name());
  }
  const bool recorded = capture() && !view;
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size()), trial;
  std::vector<std::pair<at::Tensor, at::Tensor>> operands; // As given, and as tried.
  for (c10::IValue& argument : arguments) {
    argument = argument.isDevice() ? c10::Device(c10::kCPU) : argument;
    trial.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
      operands.emplace_back(tensor, recorded && tensor.is_privateuseone() ? zeros(tensor) : on_cpu(tensor));
      return operands.back().second;
    }));
    argument = with_tensors(argument, on_cpu);
  }
  op.callBoxed(&trial);
  std::vector<at::Tensor> targets; // For every tensor computed, where it goes; undefined where it is there already.
  for (const c10::IValue& result : trial) {
    stack->push_back(with_tensors(result, [&](const at::Tensor& computed) -> at::Tensor {
      targets.emplace_back();
      at::Tensor made;
      for (const auto& [operand, tried] : operands) {
        if (computed.is_same(tried)) {
          if (computed.sizes() == operand.sizes()) {
            return operand;
          }
          made = operand.resize_(computed.sizes());
        } else if (view && computed.storage().is_alias_of(tried.storage())) {
          return view_of(operand.storage(), kKeys, computed);
        }
      }
      if (!made.defined()) {
        const auto like = computed.is_non_overlapping_and_dense() ? computed : computed.contiguous();
        made = empty_strided(like.sizes(), like.strides(), like.scalar_type());
      }
      targets.back() = on_cpu(made);
      if (!recorded) {
        targets.back().copy_(computed);
      }
      return made;
    }));
  }
  if (recorded) {
    issue([op, arguments, targets] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      Stack results = arguments;
      op.callBoxed(&results);
      auto target = targets.begin();
      for (const c10::IValue& result : results) {
        with_tensors(result, [&](const at::Tensor& computed) {
          const auto to = *target++;
          return to.defined() ? to.copy_(computed) : computed;
        });
      }
    });
  }
}

// Accelerators count integers, too.
at::Tensor histogram(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  at::Tensor counts = at::empty({bins}, self.options().dtype(at::kDouble));
  return at::histc_out(counts, self.to(at::kDouble), bins, low, high).to(self.scalar_type());
}

// Graphs --------------------------------------------------------------------------------------------------------------

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(current_stream != 0, "the default stream cannot be captured");
    TORCH_CHECK(!under_way && !captured_, "a capture is under way, or this graph needs a reset()");
    under_way = std::make_shared<Capture>(Capture{current_stream, pool});
    under_way->generator = at::globalContext().defaultGenerator(c10::kCPU).get_state();
  }
  void capture_end() override {
    TORCH_CHECK(capture(), "nothing is captured on this stream");
    const auto ended = std::exchange(under_way, nullptr);
    auto generator = at::globalContext().defaultGenerator(c10::kCPU);
    generator.set_state(ended->generator);
    TORCH_CHECK(ended->failure.empty(), "the capture has failed: ", ended->failure);
    captured_ = ended;
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(captured_ && !capture(), "nothing to replay, or a capture is under way");
    for (const auto& work : captured_->work) {
      work();
    }
  }
  void reset() override { captured_.reset(); }
  c10::MempoolId_t pool() const override { return captured_ ? captured_->pool : c10::MempoolId_t{0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    std::ofstream(path) << captured_->work.size() << " operations\n";
  }

 private:
  std::shared_ptr<Capture> captured_;
};

// What torch asks -----------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, {kDevice, 0}, id); }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return stream(std::exchange(current_stream, to.id()));
  }
  bool isStreamCapturing(const c10::Stream& which) const override {
    return under_way && under_way->stream == which.id();
  }
  void synchronizeStream(const c10::Stream&) const override { refuse_in_capture("synchronising"); }
  void synchronizeDevice(c10::DeviceIndex) const override { refuse_in_capture("synchronising"); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};
const bool registered =
    (c10::SetAllocator(kDevice, &allocator), at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

} // namespace minimal

namespace at {
using MinimalGraph = minimal::Graph;
REGISTER_GRAPH_IMPL(MINIMAL, MinimalGraph)
} // namespace at

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&minimal::run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using at::Tensor, minimal::allocator, minimal::kKeys, std::optional, c10::IntArrayRef, c10::ScalarType, c10::Layout, c10::Device;
  m.impl("empty.memory_format", [](IntArrayRef size, optional<ScalarType> dtype, optional<Layout>, optional<Device>,
                                   optional<bool>, optional<c10::MemoryFormat> format) -> Tensor {
    return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
  });
  m.impl("empty_strided", [](IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<Layout>,
                             optional<Device>, optional<bool>) { return minimal::empty_strided(size, stride, dtype); });
  // The CPU's ask a storage for its allocator.
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl("_copy_from", &minimal::copy);
  // Torch would compose these of operators that only its own devices have.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&minimal::run>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&minimal::run>());
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  m.impl("histc", &minimal::histogram);
  m.impl("_fused_sdp_choice", [](const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool,
                                 optional<double>, bool) -> int64_t { return 0; }); // at::SDPBackend::math
}
