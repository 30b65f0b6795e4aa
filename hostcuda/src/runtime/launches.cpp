// Launches of kernels. Kernels of libraries (nvcc's) are known by name and not computed, but for those of
// named_kernels.cpp; kernels of cubins (Triton's) are given to a callback.
#include "memory.h"
#include "modules.h"
#include "streams.h"

#include <cuda.h>

#include <stdexcept>
#include <unordered_map>

namespace hostcuda {

namespace {
// name, cubin's identity, grid, block, shared memory, bytes of the parameters, offset and size of each, their number.
// Answers 0 where it has computed the kernel, 1 where it does not know it, else it has failed.
using Callback = int (*)(const char*, const char*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, const void*, const unsigned*, unsigned);
std::atomic<Callback> callback{nullptr};

struct Launch {
  std::string name, image;
  dim3 grid, block;
  unsigned shared;
  std::vector<unsigned char> bytes;
  std::vector<unsigned> layout;

  void run() const {
    counters().triton_launches++;
    Callback compute = callback;
    if (!kComputes || !compute) return count_skipped(name);
    check_pointers();
    const int code = compute(name.c_str(), image.c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                             bytes.data(), layout.data(), layout.size() / 2);
    if (code == 1) return count_skipped(name);
    if (code != 0) throw std::runtime_error("kernel " + name + " failed in the interpreter");
    counters().kernels_run++;
  }
  // Every parameter of 8 bytes that lies in the device's addresses has to be allocated memory.
  void check_pointers() const {
    for (size_t i = 0; i < layout.size(); i += 2) {
      if (layout[i + 1] != sizeof(void*)) continue;
      void* pointer;
      memcpy(&pointer, bytes.data() + layout[i], sizeof pointer);
      check_range(pointer, 1, name.c_str());
    }
  }
};

std::unordered_map<const void*, std::string>& kernels() {
  static auto* all = new std::unordered_map<const void*, std::string>;
  return *all;
}
const std::string* kernel_of(const void* host) {
  Lock lock(mutex());
  auto it = kernels().find(host);
  return it == kernels().end() ? nullptr : &it->second;
}
cudaError_t launch_named(const std::string* kernel, void** args, cudaStream_t stream) {
  std::string name = kernel ? *kernel : "a kernel that was not registered";
  auto run = kernel_by_name(name, args);
  if (!run) run = [name] { count_skipped(name); };
  return guarded([&] { return submit(stream, cudaGraphNodeTypeKernel, name, std::move(run)); });
}
} // namespace

cudaError_t launch_function(const Function& function, dim3 grid, dim3 block, unsigned shared, cudaStream_t stream,
                            void** args, void** extra) {
  Launch launch{function.name, function.image, grid, block, shared, {}, {}};
  // Parameters are copied when the kernel is launched or captured: the caller's pointers are its own afterwards.
  for (auto [offset, size] : function.params) {
    if (launch.bytes.size() < offset + size) launch.bytes.resize(offset + size);
    launch.layout.insert(launch.layout.end(), {offset, size});
  }
  if (args) {
    for (size_t i = 0; i < function.params.size(); ++i)
      memcpy(launch.bytes.data() + function.params[i].offset, args[i], function.params[i].size);
  } else if (extra) { // pairs of a key and a value
    for (void** e = extra; *e != CU_LAUNCH_PARAM_END; e += 2)
      if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) memcpy(launch.bytes.data(), e[1], launch.bytes.size());
  }
  return guarded([&] {
    return submit(stream, cudaGraphNodeTypeKernel, function.name, [launch = std::move(launch)] { launch.run(); });
  });
}

} // namespace hostcuda
using namespace hostcuda;

API void hostcuda_set_callback(void* function) { callback = reinterpret_cast<Callback>(function); }

// -- what nvcc's code calls when a library is loaded --

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  Lock lock(mutex());
  kernels().emplace(host, name);
}
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  register_variable(host, size);
}

// -- launches of nvcc's code: kernel<<<grid, block, shared, stream>>> --

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;
} // namespace
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<std::string*>(kernel_of(host)));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch_named(reinterpret_cast<const std::string*>(kernel), args, stream);
}
API cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch_named(kernel_of(host), args, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch_named(kernel_of(host), args, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** args) {
  return launch_named(kernel_of(host), args, config->stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  *a = {};
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                       unsigned) {
  *count = 2;
  return cudaSuccess;
}
API cudaError_t cudaLibraryLoadData(cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*,
                                    void**, unsigned) {
  return refuse("cudaLibraryLoadData", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryGetKernel(cudaKernel_t*, cudaLibrary_t, const char*) {
  return refuse("cudaLibraryGetKernel", cudaErrorNotSupported);
}
// Linked since torch 2.15.
API cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t*, const char*, cudaJitOption*, void**, unsigned,
                                        cudaLibraryOption*, void**, unsigned) {
  return refuse("cudaLibraryLoadFromFile", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryGetKernelCount(unsigned*, cudaLibrary_t) {
  return refuse("cudaLibraryGetKernelCount", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryGetGlobal(void**, size_t*, cudaLibrary_t, const char*) {
  return refuse("cudaLibraryGetGlobal", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryGetManaged(void**, size_t*, cudaLibrary_t, const char*) {
  return refuse("cudaLibraryGetManaged", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryGetUnifiedFunction(void**, cudaLibrary_t, const char*) {
  return refuse("cudaLibraryGetUnifiedFunction", cudaErrorNotSupported);
}
API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return refuse("cudaLibraryUnload", cudaErrorNotSupported); }

// -- launches of the driver's --

API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, CUstream stream, void** args, void** extra) {
  auto* function = reinterpret_cast<Function*>(f);
  return static_cast<CUresult>(
      launch_function(*function, dim3(gx, gy, gz), dim3(bx, by, bz), shared, stream, args, extra));
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned shared, CUstream stream, void** args) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, args, nullptr);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** args, void** extra) {
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, args, extra);
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
  *count = 2;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  *count = 16;
  return CUDA_SUCCESS;
}
