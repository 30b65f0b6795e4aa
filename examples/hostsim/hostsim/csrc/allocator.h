#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace backend {

using c10::MempoolId_t;

// The memory of one pool, over all devices.
struct PoolStatistics {
  int64_t allocated = 0;
  int64_t peak_allocated = 0;
  int64_t reserved = 0;
  int64_t peak_reserved = 0;
  int64_t blocks = 0; // in use
  int64_t allocations = 0; // ever
  int64_t graphs = 0; // that keep the pool's memory
};

c10::DeviceAllocator* device_allocator();

// Grows or shrinks, keeping what the storage holds.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// Pools. {0, 0} is the ordinary one; a graph has one of its own or shares one.
MempoolId_t pool_for_graph();
MempoolId_t pool_handle();
// One capture at a time records to a pool, from retain_pool (which keeps it) until end_allocate_to_pool.
void retain_pool(MempoolId_t pool);
void end_allocate_to_pool(MempoolId_t pool);
// What is free of a pool that no graph keeps any more is returned when the cache is emptied.
void release_pool(MempoolId_t pool);
// Pools without a graph have left nothing there: the allocator of pinned memory has pools by the same names.
void pinned_cache_emptied();
PoolStatistics pool_statistics(MempoolId_t pool);

// How much of a device's memory this process may have. What needs more gets what is cached and free, unless a capture
// is under way; else there is an OutOfMemoryError.
void set_memory_fraction(double fraction, c10::DeviceIndex device);
double memory_fraction(c10::DeviceIndex device);

// The allocation `at`, counted from now and from 0, fails, and all after it if so said; a negative number: none does.
void fail_allocations(int64_t at, bool all_after);
// How many were wanted since.
int64_t allocations_wanted();

// The block that an address lies in, told apart from any other that ever had the same address; 0 outside of all.
uint64_t block_at(const void* address);
MempoolId_t pool_at(const void* address);
// -1 where an address is not the device's.
c10::DeviceIndex device_at(const void* address);

// Blocks freed while a stream that used them was captured can be reused once the capture is over.
void capture_ended();

// Whether fresh memory outside of captures is filled with bytes that read as NaN; inside of them it always is.
void set_poison(bool value);
bool poison();

} // namespace backend
