// Device memory: which addresses belong to which allocation.
#pragma once
#include "state.h"

#include <sys/types.h>

namespace hostcuda {

constexpr size_t kPage = 2ull << 20; // what an allocation is aligned to, and the granularity of virtual memory

enum class Kind { kDevice, kManaged, kMapped, kImported, kPinned, kRegistered };
struct Block {
  size_t size;
  Kind kind;
  off_t offset; // in the memory's file
};
using Blocks = std::map<uintptr_t, Block>;
Blocks& blocks();                    // by the first address; with the mutex held
Blocks::iterator block_of(uintptr_t); // that holds an address, or end()
inline bool on_host(Kind kind) { return kind == Kind::kPinned || kind == Kind::kRegistered; }

struct Usage { size_t used = 0, peak = 0; };
Usage& usage();
bool take_bytes(size_t bytes); // false where the device has no such memory left
void give_back_bytes(size_t bytes);

int memory_file();
off_t offset_of(uintptr_t address);
bool in_region(uintptr_t address); // one of the device's, allocated or not
uintptr_t take_addresses(size_t bytes); // that no allocation has had, and none will get
void unmap(uintptr_t address, size_t bytes);
void discard(off_t offset, size_t bytes); // contents of the memory's file

cudaError_t device_malloc(void** out, size_t bytes, Kind kind = Kind::kDevice);
cudaError_t device_free(void* pointer);
bool pageable(const void* pointer);   // host memory that CUDA does not know
void copy_bytes(void* to, const void* from, size_t bytes);
void set_bytes(void* to, int value, size_t bytes);

} // namespace hostcuda
