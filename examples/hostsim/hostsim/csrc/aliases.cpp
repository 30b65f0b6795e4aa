#include "aliases.h"

#include "allocator.h"
#include "devices.h"

#include <ATen/EmptyTensor.h>

namespace backend {

namespace {

at::Tensor make_view(c10::Storage storage, c10::DispatchKey key, const at::Tensor& geometry) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), geometry.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      geometry.sizes(), geometry.strides(), geometry.storage_offset());
  result._set_conj(geometry.is_conj());
  result._set_neg(geometry.is_neg());
  return result;
}

} // namespace

at::Tensor Aliases::of(const at::Tensor& tensor) {
  c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(key);
  if (found == storages_.end()) {
    const bool meta = type_ == c10::DeviceType::Meta;
    void* data = meta ? nullptr : key->mutable_data();
    c10::Storage storage(
        c10::Storage::use_byte_size_t(),
        key->nbytes(),
        c10::DataPtr(data, c10::Device(type_)),
        meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr,
        /*resizable=*/meta);
    found = storages_.emplace(key, std::move(storage)).first;
  }
  const auto dispatch_key =
      type_ == c10::DeviceType::Meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  return make_view(found->second, dispatch_key, tensor);
}

MemoryRange range_of(const at::Tensor& tensor, bool written) {
  size_t bytes = 0;
  if (tensor.numel() != 0) {
    bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  }
  return {tensor.data_ptr(), bytes, written};
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& geometry) {
  return make_view(base.storage(), c10::DispatchKey::PrivateUse1, geometry);
}

at::Tensor allocate_like(const at::Tensor& geometry) {
  // Strides in which elements share memory, as meta kernels sometimes return, cannot be written to.
  const bool dense = geometry.is_non_overlapping_and_dense();
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  if (dense) {
    return at::detail::empty_strided_generic(
        geometry.sizes(), geometry.strides(), device_allocator(), keys, geometry.scalar_type());
  }
  return at::detail::empty_generic(
      geometry.sizes(), device_allocator(), keys, geometry.scalar_type(), c10::MemoryFormat::Contiguous);
}

} // namespace backend
