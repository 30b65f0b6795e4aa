#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>

namespace hostcuda::operators {

std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> result;
  with_tensors(value, [&](const at::Tensor& t) {
    result.push_back(t);
    return t;
  });
  return result;
}

namespace {
at::Tensor make_view(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  result._set_conj(like.is_conj());
  result._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}
} // namespace

at::Tensor Aliases::of(const at::Tensor& tensor) {
  const bool meta = type_ == c10::DeviceType::Meta;
  c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(key);
  if (found == storages_.end()) {
    c10::DataPtr data(meta ? nullptr : key->mutable_data(), c10::Device(type_));
    auto* allocator = meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr;
    c10::Storage storage(c10::Storage::use_byte_size_t(), key->nbytes(), std::move(data), allocator, meta);
    found = storages_.emplace(key, std::move(storage)).first;
  }
  return make_view(found->second, meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU, tensor);
}

at::Tensor allocate_like(const at::Tensor& geometry) {
  c10::Device device(c10::kCUDA, c10::cuda::current_device());
  auto options = at::TensorOptions().dtype(geometry.dtype()).device(device);
  if (geometry.is_non_overlapping_and_dense())
    return at::empty_strided(geometry.sizes(), geometry.strides(), options);
  return at::empty(geometry.sizes(), options);
}
at::Tensor copy_of(const at::Tensor& t) {
  at::Tensor copy = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Range range_of(const at::Tensor& t) {
  if (t.numel() == 0) return {t.data_ptr(), 0};
  return {t.data_ptr(), at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size())};
}

void issue(std::string name, std::vector<Range> ranges, std::function<void()> work) {
  auto run = [name, ranges = std::move(ranges), work = std::move(work)] {
    for (auto& range : ranges) check_range(range.pointer, range.bytes, name.c_str());
    Quietly quietly;
    work();
  };
  C10_CUDA_CHECK(hostcuda::issue(at::cuda::getCurrentCUDAStream(), name, std::move(run)));
}

std::pair<uint64_t, uint64_t> Draw::unpack() const {
  if (!state.captured_) return {state.seed_.val, state.offset_.val};
  return {static_cast<uint64_t>(*state.seed_.ptr),
          static_cast<uint64_t>(*state.offset_.ptr + state.offset_intragraph_)};
}
Draw draw(const std::optional<at::Generator>& generator) {
  constexpr uint64_t kIncrement = 4; // of the offset, as the smallest of torch's kernels take
  auto* gen = at::get_generator_or_default<at::CUDAGeneratorImpl>(generator,
                                                                  at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(gen->mutex_);
  return {gen->philox_cuda_state(kIncrement)};
}
at::Generator cpu_generator(std::pair<uint64_t, uint64_t> seed_and_offset) {
  auto [seed, offset] = seed_and_offset;
  uint64_t mixed = seed * 0x9E3779B97F4A7C15ull ^ (offset + 0x7F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  return at::detail::createCPUGenerator(mixed ^ mixed >> 31);
}

} // namespace hostcuda::operators
