// Allocation and release of device and host memory, and what a pointer is.
#include "memory.h"
#include "streams.h"

#include <algorithm>

using namespace hostcuda;

namespace {
uintptr_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

cudaError_t allocate(void** out, size_t bytes, Kind kind, const char* call) {
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  if (auto error = unsafe(call)) return error;
  auto error = device_malloc(out, bytes, kind);
  TRACE("%s(%zu) -> %p %d", call, bytes, *out, error);
  return done(error);
}
// Memory is released after all work, of whichever stream, as cudaFree does on hardware. Host memory, too, which is
// decided here.
cudaError_t before_release(const char* call) {
  {
    Lock lock(mutex());
    if (auto error = unsafe(call)) return error;
  }
  run_all();
  return cudaSuccess;
}
} // namespace

API cudaError_t cudaMalloc(void** out, size_t bytes) { return allocate(out, bytes, Kind::kDevice, "cudaMalloc"); }
API cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return allocate(out, bytes, Kind::kManaged, "cudaMallocManaged");
}
// Works after a fault, too, so that a test can clear it and go on.
API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess; // initialises only
  if (auto error = before_release("cudaFree")) return error;
  Lock lock(mutex());
  TRACE("cudaFree(%p)", pointer);
  return done(device_free(pointer));
}

API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  Lock lock(mutex());
  if (auto error = unsafe("cudaHostAlloc")) return error;
  *out = aligned_alloc(4096, (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096);
  if (!*out) return done(cudaErrorMemoryAllocation);
  if (kPoison) memset(*out, 0xff, bytes);
  blocks()[number(*out)] = {bytes, Kind::kPinned, 0};
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (auto error = before_release("cudaFreeHost")) return error;
  Lock lock(mutex());
  auto it = blocks().find(number(pointer));
  if (it == blocks().end() || it->second.kind != Kind::kPinned) return done(cudaErrorInvalidValue);
  blocks().erase(it);
  free(pointer);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(mutex());
  if (auto error = unsafe("cudaHostRegister")) return error;
  if (block_of(number(pointer)) != blocks().end()) return done(cudaErrorHostMemoryAlreadyRegistered);
  blocks()[number(pointer)] = {bytes, Kind::kRegistered, 0};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  if (auto error = before_release("cudaHostUnregister")) return error;
  Lock lock(mutex());
  auto it = blocks().find(number(pointer));
  if (it == blocks().end() || it->second.kind != Kind::kRegistered) return done(cudaErrorHostMemoryNotRegistered);
  blocks().erase(it);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer; // unified addresses
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  Lock lock(mutex());
  *unused = kTotalMemory - usage().used;
  *total = kTotalMemory;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  Lock lock(mutex());
  *a = {};
  auto it = block_of(number(pointer));
  if (it == blocks().end()) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  const Kind kind = it->second.kind;
  a->devicePointer = const_cast<void*>(pointer);
  if (on_host(kind) || kind == Kind::kManaged) a->hostPointer = const_cast<void*>(pointer);
  a->type = on_host(kind)             ? cudaMemoryTypeHost
            : kind == Kind::kManaged ? cudaMemoryTypeManaged
                                     : cudaMemoryTypeDevice;
  return cudaSuccess;
}

// -- memory pools of the driver (torch's backend cudaMallocAsync): memory at once, released in the stream's order --

API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t handle) {
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  // A node of the graph on hardware (Programming Guide, "Graph Memory Nodes"), not available here.
  if (auto error = unsupported_in_capture(resolve(handle), "cudaMallocAsync", cudaErrorNotSupported)) return error;
  return done(device_malloc(out, bytes));
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t handle) {
  {
    Lock lock(mutex());
    if (auto error = unsupported_in_capture(resolve(handle), "cudaFreeAsync", cudaErrorNotSupported)) return error;
    if (pointer && blocks().find(number(pointer)) == blocks().end()) return done(cudaErrorInvalidValue);
  }
  return guarded([&] {
    return submit(handle, cudaGraphNodeTypeMemFree, "cudaFreeAsync", [pointer] {
      Lock lock(mutex());
      device_free(pointer);
    });
  });
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = reinterpret_cast<cudaMemPool_t>(0x10); // the only one
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void* value) {
  Lock lock(mutex());
  auto* number = static_cast<uint64_t*>(value);
  switch (which) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: *number = usage().used; break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh: *number = usage().peak; break;
    case cudaMemPoolAttrReleaseThreshold: *number = 0; break;
    default: *static_cast<int*>(value) = 1; // which reuse is allowed
  }
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
