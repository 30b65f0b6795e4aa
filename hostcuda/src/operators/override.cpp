// Kernels at CUDA's dispatch key in place of torch's own. What allocates, views, copies bytes or waits stays torch's.
#include "attention.h"
#include "call.h"
#include "recurrent.h"

#include <ATen/ops/copy_native.h>

#include <memory>
#include <sstream>

namespace hostcuda::operators {

namespace {
void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto last = torch::jit::last(*stack, count);
  Stack arguments(last.begin(), last.end());
  torch::jit::drop(*stack, count);
  Quietly quietly;
  for (IValue& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

// Where only bytes move, torch's own code calls cudaMemcpyAsync (ATen/native/cuda/Copy.cu); else it is a kernel.
bool only_bytes(const at::Tensor& to, const at::Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg() && to.is_non_overlapping_and_dense();
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const bool kernel = self.is_cuda() && src.is_cuda() && !self.is_same(src) && !only_bytes(self, src);
  if (!kernel) return at::native::copy_(self, src, non_blocking);
  TORCH_CHECK(at::is_expandable_to(src.sizes(), self.sizes()), "The expanded size of the tensor (", self.sizes(),
              ") must match the existing size (", src.sizes(), ") in copy_");
  Aliases aliases(c10::DeviceType::CPU);
  at::Tensor to = aliases.of(self), from = aliases.of(src);
  issue("aten::copy_", {range_of(to), range_of(from)}, [to, from]() mutable { to.copy_(from); });
  return self;
}
void foreach_copy_(at::TensorList self, at::TensorList src, bool non_blocking) {
  for (size_t i = 0; i < self.size(); ++i) {
    at::Tensor to = self[i];
    to.copy_(src[i], non_blocking);
  }
}
// What is taken over stays so until the process ends.
torch::Library& kept_library() {
  static std::vector<std::unique_ptr<torch::Library>> kept;
  auto kind = torch::Library::IMPL;
  kept.push_back(std::make_unique<torch::Library>(kind, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__));
  return *kept.back();
}
} // namespace

} // namespace hostcuda::operators

// `names`: operators of ATen, one a line. Returns how many were taken over.
extern "C" __attribute__((visibility("default"))) int hostcuda_override(const char* names) {
  using namespace hostcuda::operators;
  torch::Library& library = kept_library();
  std::istringstream lines(names);
  int count = 0;
  for (std::string name; std::getline(lines, name); ++count)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  return count;
}

// Those with a kernel of their own here.
extern "C" __attribute__((visibility("default"))) void hostcuda_override_others() {
  using namespace hostcuda::operators;
  torch::Library& library = kept_library();
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  register_attention(library);
  register_recurrent(library);
}
