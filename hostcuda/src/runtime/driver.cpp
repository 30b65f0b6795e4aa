// The driver's interface (cu*): devices, contexts, pointers, copies. Most of it is the runtime's under other names;
// error codes have the same numbers. Virtual memory, modules and launches are in their own files.
#include "device.h"
#include "memory.h"
#include "streams.h"

#include <cuda.h>

#include <algorithm>

using namespace hostcuda;

namespace {
CUresult result(cudaError_t error) { return static_cast<CUresult>(error); }
const auto kContext = reinterpret_cast<CUcontext>(0x1000); // the only one, and always the current one
CUresult context(CUcontext* out) {
  if (out) *out = kContext;
  return CUDA_SUCCESS;
}
} // namespace

API CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int* version) { return result(cudaDriverGetVersion(version)); }
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int i) {
  *device = i;
  return i == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* out, int size, CUdevice) {
  snprintf(out, size, "%s", kName);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid* out, CUdevice) {
  for (int i = 0; i < 16; ++i) out->bytes[i] = i + 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = kTotalMemory;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) { return context(out); }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* out) { return context(out); }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext* out) { return context(out); }
API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize() { return result(cudaDeviceSynchronize()); }

API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr p) {
  Lock lock(mutex());
  auto it = block_of(p);
  if (it == blocks().end()) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = p; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = kContext; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = on_host(it->second.kind) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    default: *static_cast<int*>(value) = 0; // the device's ordinal, and what is not available
  }
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** values, CUdeviceptr p) {
  for (unsigned i = 0; i < count; ++i)
    if (cuPointerGetAttribute(values[i], which[i], p) != CUDA_SUCCESS) *static_cast<int*>(values[i]) = 0;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr p) {
  Lock lock(mutex());
  auto it = block_of(p);
  if (it == blocks().end()) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = it->first;
  if (size) *size = it->second.size;
  return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t* unused, size_t* total) { return result(cudaMemGetInfo(unused, total)); }
API CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  return result(cudaMalloc(reinterpret_cast<void**>(out), bytes));
}
API CUresult cuMemFree_v2(CUdeviceptr p) { return result(cudaFree(reinterpret_cast<void*>(p))); }
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return result(cudaMemcpy(reinterpret_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice));
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return result(cudaMemcpy(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDeviceToHost));
}
namespace {
CUresult fill(const char* name, CUdeviceptr p, uint32_t value, size_t count, CUstream stream) {
  std::function<void()> run = [=] {
    check_range(reinterpret_cast<void*>(p), 4 * count, name);
    std::fill_n(reinterpret_cast<uint32_t*>(p), count, value);
  };
  if (!kComputes) run = nullptr;
  return result(guarded([&] { return submit(stream, cudaGraphNodeTypeMemset, name, run); }));
}
} // namespace
API CUresult cuMemsetD32Async(CUdeviceptr p, unsigned value, size_t count, CUstream stream) {
  return fill("cuMemsetD32Async", p, value, count, stream);
}
API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr p, cuuint32_t value, unsigned) {
  return fill("cuStreamWriteValue32", p, value, 1, stream);
}
API CUresult cuStreamSynchronize(CUstream stream) { return result(cudaStreamSynchronize(stream)); }
API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return result(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}

// The callback reads it again (kernels/parameters.py): address, type and rank, sizes, strides, box.
API CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  auto* words = reinterpret_cast<uint64_t*>(map);
  words[0] = reinterpret_cast<uint64_t>(address);
  words[1] = static_cast<uint64_t>(type) << 32 | rank;
  for (unsigned i = 0; i < rank && i < 5; ++i) {
    words[2 + i] = dims[i];
    if (i + 1 < rank) words[7 + i] = strides[i];
    reinterpret_cast<uint32_t*>(words + 12)[i] = box[i];
  }
  return CUDA_SUCCESS;
}
