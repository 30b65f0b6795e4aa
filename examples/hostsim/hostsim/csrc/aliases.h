#pragma once

#include "work.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>

#include <unordered_map>

namespace backend {

// Tensors of another kind (CPU or meta) in the place of device tensors, for one call. Tensors that share a storage
// share one there, too, at the same offsets: kernels look at that when they check for overlaps.
class Aliases {
 public:
  // CPU: over the same bytes, which are not owned. Meta: without any.
  explicit Aliases(c10::DeviceType type) : type_(type) {}

  at::Tensor of(const at::Tensor& tensor);

 private:
  const c10::DeviceType type_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// The bytes that a tensor spans, of whatever device.
MemoryRange range_of(const at::Tensor& tensor, bool written);

// A tensor of this device over the storage of `base`, with everything else as `geometry` has it.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& geometry);

// A new tensor of the current device, with everything but the values as `geometry` has it.
at::Tensor allocate_like(const at::Tensor& geometry);

} // namespace backend
