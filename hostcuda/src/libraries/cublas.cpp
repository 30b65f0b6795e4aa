// What torch asks of cuBLAS before a product: handle, stream, workspace. (The product is an operator's.)
// These names have no versions, and are found first: they answer references with any version.
#include "../hostcuda.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {
enum Status { kSuccess = 0, kNotInitialized = 1 }; // cublasStatus_t
struct Handle {
  cudaStream_t stream = nullptr;
  void* own = nullptr;
};
Handle* of(void* handle) { return static_cast<Handle*>(handle); }
} // namespace

// It takes device memory (cuBLAS documentation, cublasCreate(): "allocates hardware resources on the host and
// device"): refused in a capture, as on hardware.
API int cublasCreate_v2(void** out) {
  auto* handle = new Handle;
  *out = nullptr;
  if (cudaMalloc(&handle->own, 4096) != cudaSuccess) {
    delete handle;
    cudaGetLastError();
    return kNotInitialized;
  }
  *out = handle;
  return kSuccess;
}
API int cublasDestroy_v2(void* handle) {
  cudaFree(of(handle)->own); // waits for the device, as cuBLAS documents of cublasDestroy()
  delete of(handle);
  return kSuccess;
}
API int cublasSetStream_v2(void* handle, cudaStream_t stream) {
  of(handle)->stream = stream;
  return kSuccess;
}
API int cublasGetStream_v2(void* handle, cudaStream_t* stream) {
  *stream = of(handle)->stream;
  return kSuccess;
}
API int cublasSetWorkspace_v2(void*, void*, size_t) { return kSuccess; }
API int cublasSetMathMode(void*, int) { return kSuccess; }
API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return kSuccess;
}
API int cublasSetPointerMode_v2(void*, int) { return kSuccess; }
API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return kSuccess;
}
API int cublasSetSmCountTarget(void*, int) { return kSuccess; }
