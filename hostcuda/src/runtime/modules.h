// Kernels: those of libraries, which have names only, and those of cubins, which have parameters, too.
#pragma once
#include "state.h"

#include <map>
#include <memory>
#include <vector>

namespace hostcuda {

struct Param {
  unsigned offset, size; // among the bytes of all parameters
};
struct Function {
  std::string name;
  std::string image; // identity of the cubin
  std::vector<Param> params;
};
struct Module {
  std::vector<char> bytes;
  std::string identity;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

std::string identity_of(const char* data, size_t size); // a hash of the bytes
size_t elf_size(const char* data);
// A kernel of the cubin and the layout of its parameters; null where it has none of this name.
std::unique_ptr<Function> read_function(const Module& module, const std::string& name);

// What a library's kernel does, where it is one of the few that are computed; else null.
std::function<void()> kernel_by_name(const std::string& name, void** args);

// A launch of a cubin's kernel: computed by the callback (Triton's interpreter), if there is one.
cudaError_t launch_function(const Function& function, dim3 grid, dim3 block, unsigned shared, cudaStream_t stream,
                            void** args, void** extra);

} // namespace hostcuda
