// Device memory whose physical part is given back and taken again while its addresses stay: CUDA's driver,
// "Virtual Memory Management". cuda_memory.py is its only caller.
// Every function may be called from any thread.

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../../torch_private/native/cuda_driver.h"

namespace {

// dlpack.h, "DLManagedTensor".
struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *sizes, *strides;
  uint64_t offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
constexpr int kDeviceCUDA = 2, kUnsigned = 1;

// One span of addresses. With physical memory: mapped. Freed: its tensors are gone; work may still use it.
struct Segment {
  size_t bytes;
  int device;
  int64_t owner;
  Handle handle;
  bool mapped;
  int64_t freed;  // 0, or the number of the free
};
std::mutex mutex;
std::map<Pointer, Segment> segments;
int64_t frees = 0;
// Whose memory this thread allocates.
thread_local int64_t current_owner = 0;

// The mutex is held by whoever calls these.
int take(Pointer at, Segment& segment) {
  const auto wanted = properties(segment.device);
  if (const int error = driver.create(&segment.handle, segment.bytes, &wanted, 0)) return error;
  if (const int error = driver.map(at, segment.bytes, 0, segment.handle, 0)) {
    driver.release(segment.handle);
    return error;
  }
  const Access access{{kOnDevice, segment.device}, kReadAndWrite};
  const int error = driver.access(at, segment.bytes, &access, 1);
  if (error) {
    driver.unmap(at, segment.bytes);
    driver.release(segment.handle);
    return error;
  }
  segment.mapped = true;
  return kSuccess;
}

int give_back(Pointer at, Segment& segment) {
  if (const int error = driver.unmap(at, segment.bytes)) return error;
  segment.mapped = false;
  return driver.release(segment.handle);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Returns the name of what the driver lacks, or null.
API const char* fxwrap_memory_open(const char* library) { return open_driver(library); }

// Sets whose memory this thread allocates from now on; returns whose it was before.
API int64_t fxwrap_memory_owner(int64_t owner) { return std::exchange(current_owner, owner); }

// Torch's signature of an allocator's function (CUDAPluggableAllocator). Null if there is no memory.
API void* fxwrap_memory_allocate(ssize_t bytes, int device, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto wanted = properties(device);
  size_t unit = 0;
  if (driver.granularity(&unit, &wanted, kMinimum) != kSuccess || unit == 0) return nullptr;
  Segment segment{(static_cast<size_t>(bytes) + unit - 1) / unit * unit, device, current_owner, 0, false, 0};
  Pointer at = 0;
  if (driver.reserve(&at, segment.bytes, 0, 0, 0) != kSuccess) return nullptr;
  if (take(at, segment) != kSuccess) {
    driver.free(at, segment.bytes);
    return nullptr;
  }
  segments[at] = segment;
  return reinterpret_cast<void*>(at);
}

// The same. Unlike cudaFree, cuMemUnmap does not wait for work, and nothing can be waited for here: the caller may
// hold the allocator's lock, or a graph may be captured. So the memory stays until fxwrap_memory_reclaim.
API void fxwrap_memory_free(void* at, size_t, int, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = segments.find(reinterpret_cast<Pointer>(at));
  if (found != segments.end()) found->second.freed = ++frees;
}

// A DLPack tensor over memory of its own, which is freed with it. Null if there is no memory.
API void* fxwrap_memory_tensor(int64_t bytes, int device) {
  void* data = fxwrap_memory_allocate(bytes, device, nullptr);
  if (data == nullptr) return nullptr;
  auto* managed = new ManagedTensor{};
  auto* layout = new int64_t[2]{bytes, 1};
  managed->tensor = {data, kDeviceCUDA, device, 1, kUnsigned, 8, 1, layout, layout + 1, 0};
  managed->deleter = [](ManagedTensor* self) {
    fxwrap_memory_free(self->tensor.data, 0, 0, nullptr);
    delete[] self->tensor.sizes;
    delete self;
  };
  return managed;
}

// Gives back an owner's physical memory; its work must be done. Returns the bytes, or minus an error.
API int64_t fxwrap_memory_unmap(int64_t owner) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (auto& [at, segment] : segments) {
    if (segment.owner != owner || !segment.mapped) continue;
    if (const int error = give_back(at, segment)) return -error;
    bytes += static_cast<int64_t>(segment.bytes);
  }
  return bytes;
}

// Takes physical memory for an owner's segments that have none: for all of them, or for none. Returns the bytes, or
// minus an error. Segments that were freed meanwhile stay as they are.
API int64_t fxwrap_memory_map(int64_t owner) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  std::vector<std::pair<const Pointer, Segment>*> taken;
  for (auto& entry : segments) {
    auto& [at, segment] = entry;
    if (segment.owner != owner || segment.mapped || segment.freed) continue;
    if (const int error = take(at, segment)) {
      for (auto* other : taken) give_back(other->first, other->second);
      return -error;
    }
    taken.push_back(&entry);
    bytes += static_cast<int64_t>(segment.bytes);
  }
  return bytes;
}

// The number of the last free that left memory of a device; 0 if there is none.
API int64_t fxwrap_memory_freed(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t last = 0;
  for (const auto& [at, segment] : segments)
    if (segment.device == device) last = std::max(last, segment.freed);
  return last;
}

// Returns to the driver what was freed until then (fxwrap_memory_freed); its work must be done. Returns the bytes.
API int64_t fxwrap_memory_reclaim(int device, int64_t until) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (auto it = segments.begin(); it != segments.end();) {
    auto& [at, segment] = *it;
    const bool goes = segment.device == device && segment.freed && segment.freed <= until;
    if (!goes || (segment.mapped && give_back(at, segment) != kSuccess)) {
      ++it;
      continue;
    }
    driver.free(at, segment.bytes);
    bytes += static_cast<int64_t>(segment.bytes);
    it = segments.erase(it);
  }
  return bytes;
}
