// Functions that are looked up by name. One that the device does not have is answered with "not found", and remembered
// (hostcuda.missing()) and printed once: torch may call the null pointer that it gets.
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
void* entry_point(const char* symbol) {
  for (std::string suffix : {"_v3", "_v2", ""})
    if (void* found = dlsym(self(), (symbol + suffix).c_str())) return found;
  Lock lock(mutex());
  if (missing()[symbol]++ == 0) {
    fprintf(stderr, "hostcuda: %s is asked for, and this device does not have it\n", symbol);
    refuse((std::string("look-up of ") + symbol).c_str(), cudaErrorSymbolNotFound);
    cudaGetLastError(); // a look-up leaves no error
  }
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
