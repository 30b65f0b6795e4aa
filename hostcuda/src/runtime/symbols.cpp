// Functions that are looked up by name. One that the device does not have is answered with "not found", remembered
// (hostcuda_missing) and named on stderr once: torch may call the null pointer that it gets.
#include "state.h"

#include <cuda.h>
#include <dlfcn.h>

namespace hostcuda {

namespace {
// This library, in which the driver's functions are, too.
void* self() {
  static void* handle = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return handle;
}
// torch looks these up when it starts, and calls them only where somebody asks for multicast memory, green contexts
// or logs of the driver (c10/cuda/driver_api.h, ATen/cuda/CUDAGreenContext.cpp).
bool looked_up_only(const std::string& symbol) {
  for (const char* prefix : {"cuMulticast", "cuGreenCtx", "cuCtxFromGreenCtx", "cuDevSm", "cuDevResource",
                             "cuDeviceGetDevResource", "cuLogs"})
    if (symbol.rfind(prefix, 0) == 0) return true;
  return false;
}
void* entry_point(const char* symbol) {
  for (std::string suffix : {"_v2", ""})
    if (void* found = dlsym(self(), (symbol + suffix).c_str())) return found;
  Lock lock(mutex());
  if (missing()[symbol]++ == 0 && !looked_up_only(symbol))
    fprintf(stderr, "hostcuda: %s is asked for, and this device does not have it\n", symbol);
  return nullptr;
}
} // namespace

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  *out = entry_point(symbol);
  if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char* symbol, void** out, int, cuuint64_t,
                                 CUdriverProcAddressQueryResult* status) {
  *out = entry_point(symbol);
  if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
