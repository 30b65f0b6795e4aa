// Device memory is a file in memory (memfd), mapped into a range of addresses that was reserved for it.
//
// No address is used twice, and freed memory is unmapped: who uses memory that was freed gets a fault, not the bytes
// of its next owner. (Decided here. A GPU's driver hands addresses out again.)
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

namespace hostcuda {

namespace {
constexpr size_t kReserved = 1ull << 42;
constexpr size_t kHostPage = 4096;
constexpr size_t kAlignment = 512; // of what cudaMalloc answers: at least 256 (Programming Guide, "Device Memory")

struct Region {
  uintptr_t begin = 0;
  size_t taken = 0;
  int file = -1;
} region;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

[[noreturn]] void give_up(const char* what) {
  perror(what);
  abort();
}
void open_region() {
  if (region.begin) return;
  void* begin = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) give_up("hostcuda: cannot reserve 4 TiB of addresses (is `ulimit -v` set?)");
  region.begin = reinterpret_cast<uintptr_t>(begin);
  region.taken = rounded(region.begin, kPage) - region.begin;
  region.file = memfd_create("hostcuda", MFD_CLOEXEC);
  if (region.file < 0 || ftruncate(region.file, kReserved) != 0) give_up("hostcuda: cannot create the memory's file");
}

struct IllegalAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};
} // namespace

Blocks& blocks() {
  static auto* one = new Blocks;
  return *one;
}
Usage& usage() {
  static auto* one = new Usage;
  return *one;
}

bool take_bytes(size_t bytes) {
  auto& [used, peak] = usage();
  if (used + bytes > kTotalMemory) return false;
  used += bytes;
  peak = std::max(peak, used);
  counters().mallocs++;
  return true;
}
void give_back_bytes(size_t bytes) { usage().used -= bytes; }

int memory_file() {
  open_region();
  return region.file;
}
off_t offset_of(uintptr_t address) { return address - region.begin; }
bool in_region(uintptr_t p) { return region.begin && p >= region.begin && p < region.begin + kReserved; }

Blocks::iterator block_of(uintptr_t p) {
  auto& all = blocks();
  auto it = all.upper_bound(p);
  if (it == all.begin()) return all.end();
  --it;
  return p < it->first + std::max<size_t>(it->second.size, 1) ? it : all.end();
}

uintptr_t take_addresses(size_t bytes) {
  open_region();
  uintptr_t p = region.begin + region.taken;
  region.taken += rounded(bytes, kPage) + kPage; // a page between blocks: what runs over an end hits nothing
  if (region.taken > kReserved) {
    fprintf(stderr, "hostcuda: all 4 TiB of addresses have been used once; the process has to start anew\n");
    abort();
  }
  return p;
}

cudaError_t device_malloc(void** out, size_t bytes, Kind kind) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess; // no pointer is answered (Driver API says invalid value; torch never asks)
  bytes = rounded(bytes, kAlignment);
  if (!take_bytes(bytes)) return cudaErrorMemoryAllocation;
  uintptr_t p = take_addresses(bytes);
  off_t offset = offset_of(p);
  void* at = mmap(reinterpret_cast<void*>(p), rounded(bytes, kHostPage), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED | MAP_NORESERVE, region.file, offset);
  if (at == MAP_FAILED) {
    give_back_bytes(bytes);
    return cudaErrorMemoryAllocation;
  }
  if (kPoison) memset(at, 0xff, bytes);
  blocks()[p] = {bytes, kind, offset};
  *out = at;
  return cudaSuccess;
}
void unmap(uintptr_t p, size_t bytes) {
  mmap(reinterpret_cast<void*>(p), rounded(bytes, kHostPage), PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
void discard(off_t offset, size_t bytes) {
  fallocate(region.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, rounded(bytes, kHostPage));
}
cudaError_t device_free(void* pointer) {
  if (!pointer) return cudaSuccess;
  auto it = blocks().find(reinterpret_cast<uintptr_t>(pointer));
  if (it == blocks().end()) return cudaErrorInvalidValue;
  const auto [size, kind, offset] = it->second;
  if (kind != Kind::kDevice && kind != Kind::kManaged) return cudaErrorInvalidValue;
  unmap(it->first, size);
  discard(offset, size);
  give_back_bytes(size);
  blocks().erase(it);
  counters().frees++;
  return cudaSuccess;
}

bool pageable(const void* pointer) {
  Lock lock(mutex());
  auto p = reinterpret_cast<uintptr_t>(pointer);
  return !in_region(p) && block_of(p) == blocks().end();
}

// What a kernel or a copy touches has to be allocated: else cudaErrorIllegalAddress, which stays (Runtime API,
// cudaErrorIllegalAddress: "To continue using CUDA, the process must be terminated and relaunched").
__attribute__((visibility("default"))) void check_range(const void* pointer, size_t bytes, const char* what) {
  auto p = reinterpret_cast<uintptr_t>(pointer);
  if (bytes == 0 || !in_region(p)) return;
  Lock lock(mutex());
  auto it = block_of(p);
  const bool allocated = it != blocks().end();
  if (allocated && p + bytes <= it->first + it->second.size) return;
  counters().wild++;
  sticky = cudaErrorIllegalAddress;
  char text[256];
  snprintf(text, sizeof text, "%s touches %zu bytes at %p, which %s", what, bytes, pointer,
           allocated ? "exceeds its allocation" : "is not allocated");
  throw IllegalAddress(text);
}
__attribute__((visibility("default"))) bool is_device_pointer(const void* pointer) {
  return in_region(reinterpret_cast<uintptr_t>(pointer));
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  check_range(to, bytes, "cudaMemcpy (destination)");
  check_range(from, bytes, "cudaMemcpy (source)");
  counters().memcpys++;
  memmove(to, from, bytes);
}
void set_bytes(void* to, int value, size_t bytes) {
  check_range(to, bytes, "cudaMemset");
  counters().memsets++;
  memset(to, value, bytes);
}

} // namespace hostcuda
