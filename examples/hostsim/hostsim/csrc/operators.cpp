// The operators that make tensors and look at them from outside; all others compute, and go through the fallback.

#include "aliases.h"
#include "allocator.h"
#include "copies.h"
#include "devices.h"
#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace backend {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex checked_options(
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "only strided tensors exist on this device");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "only CPU tensors can be pinned");
  return checked_device(device ? device->index() : -1);
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  OnDevice guard(checked_options(layout, device, pin_memory));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  OnDevice guard(checked_options(layout, device, pin_memory));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void grow_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
  }
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
  }
  if (format) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "resize_ needs a memory format to change to");
    impl->empty_tensor_restride(*format);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_to_part_of_storage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  OnDevice guard(self.device().index());
  at::Storage storage(at::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_to_part_of_storage(self, std::move(storage), 0, {0}, {});
}

at::Tensor copy_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) {
    destination.resize_(self.sizes());
  }
  return copy_between(self, destination, /*non_blocking=*/false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// By operators that take the device's generator: the CPU kernel of this one takes the host's.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double probability, std::optional<bool> train) {
  const auto booleans = input.options().dtype(c10::ScalarType::Bool);
  if (!train.value_or(true) || input.numel() == 0 || probability == 0) {
    return {input.clone(), at::ones_like(input, booleans)};
  }
  if (probability == 1) {
    return {at::zeros_like(input), at::zeros_like(input, booleans)};
  }
  at::Tensor mask = at::empty_like(input, booleans).bernoulli_(1 - probability);
  return {at::mul(input, mask).mul_(1 / (1 - probability)), mask};
}

// Accelerators count integers, too, and models rely on it; the CPU counts floating-point numbers only.
void histogram(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[first].toTensor();
  const bool integral = c10::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  if (integral) {
    (*stack)[first] = self.to(c10::ScalarType::Double);
  }
  run_on_device(op, stack);
  if (integral) {
    stack->back() = stack->back().toTensor().to(self.scalar_type());
  }
}

// Attention as a composition of other operators.
int64_t choose_attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  constexpr int64_t kMath = 0; // Of at::SDPBackend, whose header needs a CUDA build.
  return kMath;
}

} // namespace

} // namespace backend

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace backend;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_", &set_to_nothing);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_to_part_of_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("_copy_from", &copy_between);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_foreach_copy_", &copy_lists);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &dropout);
  m.impl("_fused_sdp_choice", &choose_attention);
  // Torch would compose these of operators that only its own devices have; the CPU has them whole.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histogram>());
  // The CPU kernel warns if it is given a scalar to write to, which is what torch would do.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
}

// A copy resolves lazy conjugation and negation itself; resolving them before would need a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
