// Kernels of libraries that are computed here, by name. The device reads no machine code, so that of a library's kernel
// it knows the name and the arguments alone, and leaves it out (ATen's operators are computed above it). That would not
// do for this one, which is no operator's: torch's CUDAGraph launches it to hand a predicate to a conditional node.
#include "conditionals.h"
#include "memory.h"
#include "modules.h"

#include <stdexcept>

namespace hostcuda {

namespace {
// ATen/cuda/CUDAGraph.cu: set_conditional_handle_kernel(cudaGraphConditionalHandle handle, const bool* value) calls
// cudaGraphSetConditional(handle, *value). The end of its mangled name, with the types of its parameters.
constexpr const char* kSetConditional = "set_conditional_handle_kernelEyPKb";

std::function<void()> set_conditional(const std::string& name, void** args) {
  const auto handle = *static_cast<cudaGraphConditionalHandle*>(args[0]);
  const auto* value = *static_cast<const unsigned char**>(args[1]);
  Lock lock(mutex());
  return [condition = condition_of(handle), name, value] {
    if (!kComputes) return count_skipped(name);
    check_range(value, 1, name.c_str());
    if (pageable(value)) { // a tensor of the CPU's, for which torch does not look
      sticky = cudaErrorIllegalAddress;
      throw std::runtime_error(name + " reads memory of the host's");
    }
    if (!condition) throw std::runtime_error(name + ": there is no such conditional handle");
    set_condition(*condition, *value != 0);
    counters().kernels_run++;
  };
}
bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && !text.compare(text.size() - end.size(), end.size(), end);
}
} // namespace

std::function<void()> kernel_by_name(const std::string& name, void** args) {
  if (ends_with(name, kSetConditional)) return set_conditional(name, args);
  return nullptr;
}

} // namespace hostcuda
