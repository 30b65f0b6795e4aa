// Tensors of the device as the CPU's kernels see them, and work that is issued to the current stream.
#pragma once
#include "../hostcuda.h"

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace hostcuda::operators {

using c10::IValue;
using torch::jit::Stack;

// As a kernel runs: no autograd, no autocast, no modes of Python.
struct Quietly {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::PythonDispatcher})};
};

// The value with each tensor in it changed.
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
std::vector<at::Tensor> tensors_in(const IValue& value);

inline bool on_device(const at::Tensor& t) { return t.defined() && t.is_cuda(); }

// Tensors of another device type over the same bytes (or, for Meta, over none): tensors that share a storage share
// one here. They own nothing.
class Aliases {
 public:
  explicit Aliases(c10::DeviceType type) : type_(type) {}
  at::Tensor of(const at::Tensor& tensor);

 private:
  c10::DeviceType type_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

at::Tensor allocate_like(const at::Tensor& geometry); // on the current device
at::Tensor copy_of(const at::Tensor& t);

struct Range {
  const void* pointer;
  size_t bytes;
};
Range range_of(const at::Tensor& t);

// A kernel on the current stream; the ranges have to be allocated when it runs.
void issue(std::string name, std::vector<Range> ranges, std::function<void()> work);

// Numbers that follow from the CUDA generator's seed and offset, which are known when the work runs: in a capture
// they are on the device, and each replay has its own (ATen/cuda/CUDAGeneratorImpl.cpp, philox_cuda_state).
struct Draw {
  at::PhiloxCudaState state;
  std::pair<uint64_t, uint64_t> unpack() const; // seed and offset
};
Draw draw(const std::optional<at::Generator>& generator);
at::Generator cpu_generator(std::pair<uint64_t, uint64_t> seed_and_offset);

} // namespace hostcuda::operators
