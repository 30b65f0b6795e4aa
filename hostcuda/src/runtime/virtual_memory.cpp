// Virtual memory (Driver API, "Virtual Memory Management"): what torch's expandable segments are made of. A handle is
// a range of the memory's file.
//
// These calls are allowed in captures (decided here): torch's ExpandableSegment makes them unguarded, and captures on
// hardware (c10/cuda/CUDACachingAllocator.cpp).
#include "memory.h"
#include "streams.h"

#include <cuda.h>
#include <sys/mman.h>

using namespace hostcuda;

namespace {
struct Physical {
  size_t size;
  off_t offset;
  int references;
};
struct Mapping {
  size_t size;
  Physical* physical;
};
std::map<uintptr_t, Mapping>& mappings() {
  static auto* one = new std::map<uintptr_t, Mapping>;
  return *one;
}
std::map<uintptr_t, size_t>& reservations() {
  static auto* one = new std::map<uintptr_t, size_t>;
  return *one;
}
bool is_reserved(uintptr_t p, size_t size) {
  auto it = reservations().upper_bound(p);
  return it != reservations().begin() && p + size <= (--it)->first + it->second;
}
bool touches_mapping(uintptr_t p, size_t size) {
  auto it = mappings().lower_bound(p + size);
  return it != mappings().begin() && (--it)->first + it->second.size > p;
}
// Whether a range consists of whole mappings, without a gap.
bool is_mapped(uintptr_t p, size_t size) {
  uintptr_t end = p;
  for (auto it = mappings().find(p); it != mappings().end() && it->first == end && end < p + size; ++it)
    end += it->second.size;
  return size > 0 && end == p + size;
}
CUresult refuse_range(const char* call) {
  refuse(call, cudaErrorInvalidValue);
  return CUDA_ERROR_INVALID_VALUE;
}

// "The memory is released when it is unmapped everywhere" and its handle, too (cuMemRelease).
void drop(Physical* physical) {
  if (--physical->references > 0) return;
  discard(physical->offset, physical->size);
  give_back_bytes(physical->size);
  counters().frees++;
  delete physical;
}
// Neighbouring mappings are one allocation to whoever looks for bounds: tensors lie across them.
void join_blocks() {
  auto& all = blocks();
  for (auto it = all.begin(); it != all.end();) it = it->second.kind == Kind::kMapped ? all.erase(it) : std::next(it);
  uintptr_t begin = 0, end = 0;
  auto add = [&] { if (end > begin) all[begin] = {end - begin, Kind::kMapped, 0}; };
  for (auto& [p, mapping] : mappings()) {
    if (p != end) {
      add();
      begin = p;
    }
    end = p + mapping.size;
  }
  add();
}
} // namespace

API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  *bytes = kPage;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t size, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(mutex());
  *p = take_addresses(size);
  reservations()[*p] = size;
  TRACE("cuMemAddressReserve(%zu) -> %llx", size, *p);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { // the addresses are never used again
  Lock lock(mutex());
  auto it = reservations().find(p);
  if (it == reservations().end() || it->second != size || touches_mapping(p, size))
    return refuse_range("cuMemAddressFree");
  reservations().erase(it);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                         unsigned long long) {
  TRACE("cuMemCreate(%zu)", size);
  Lock lock(mutex());
  if (!take_bytes(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto* physical = new Physical{size, offset_of(take_addresses(size)), 1}; // an address gives a place in the file
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(physical);
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(mutex());
  drop(reinterpret_cast<Physical*>(handle));
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
  Lock lock(mutex());
  auto* physical = reinterpret_cast<Physical*>(handle);
  TRACE("cuMemMap(%llx, %zu, %zu, %p)", p, size, offset, static_cast<void*>(physical));
  if (!is_reserved(p, size) || touches_mapping(p, size) || offset + size > physical->size)
    return refuse_range("cuMemMap");
  // No access before cuMemSetAccess.
  void* at = mmap(reinterpret_cast<void*>(p), size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory_file(),
                  physical->offset + offset);
  if (at == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  physical->references++;
  mappings()[p] = {size, physical};
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc*, size_t) {
  TRACE("cuMemSetAccess(%llx, %zu)", p, size);
  Lock lock(mutex());
  if (!is_mapped(p, size)) return refuse_range("cuMemSetAccess");
  if (mprotect(reinterpret_cast<void*>(p), size, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (kPoison) memset(reinterpret_cast<void*>(p), 0xff, size);
  join_blocks();
  return CUDA_SUCCESS;
}
// Waits for all work, as cudaFree does (decided here: on hardware the caller has to).
API CUresult cuMemUnmap(CUdeviceptr p, size_t size) {
  run_all();
  Lock lock(mutex());
  if (!is_mapped(p, size)) return refuse_range("cuMemUnmap");
  for (auto it = mappings().lower_bound(p); it != mappings().end() && it->first < p + size;) {
    unmap(it->first, it->second.size);
    drop(it->second.physical);
    it = mappings().erase(it);
  }
  join_blocks();
  return CUDA_SUCCESS;
}

// Sharing of handles between processes, which torch does for expandable segments over IPC: not available.
API CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                          unsigned long long) {
  refuse("cuMemExportToShareableHandle", cudaErrorNotSupported);
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  refuse("cuMemImportFromShareableHandle", cudaErrorNotSupported);
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) {
  refuse("cuMemRetainAllocationHandle", cudaErrorNotSupported);
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) {
  refuse("cuMemGetAllocationPropertiesFromHandle", cudaErrorNotSupported);
  return CUDA_ERROR_NOT_SUPPORTED;
}
