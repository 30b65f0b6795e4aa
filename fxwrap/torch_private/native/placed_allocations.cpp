// Addresses for what a thread allocates in a pool of torch's CUDA allocator: those of a list, one after another, or
// addresses for a capture that never runs.
//
// torch's allocator calls `fxwrap_place` with its lock held, and a thread that frees a tensor waits for that lock with
// Python's lock held. So nothing here may call Python.
//
// A capture that never runs touches no byte. But the driver takes no pointer that is not the device's where it records
// a copy or a memset. So all its addresses are mapped, one span after another, to the same few bytes of the device.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "cuda_driver.h"

namespace {

constexpr size_t kHalf = size_t(1) << 39, kSpan = size_t(32) << 20, kAlignment = 512;

// Of one device. The first half of the addresses is for operands, the other for what calls allocate.
struct Stage {
  Pointer begin = 0;
  Handle handle = 0;
  size_t mapped[2] = {0, 0};  // bytes of each half
  size_t taken = 0;  // bytes of the second half that were handed out: torch finds blocks by address, so each is new
};
std::mutex mutex;
std::map<int, Stage> stages;

// Maps the addresses up to `end`, in bytes from the begin of a half. With the mutex held.
bool map_up_to(Stage& stage, int device, int half, size_t end) {
  if (end > kHalf) return false;
  if (stage.handle == 0) {
    const Properties wanted = properties(device);
    if (driver.create(&stage.handle, kSpan, &wanted, 0)) return stage.handle = 0, false;
  }
  while (stage.mapped[half] < end) {
    const Pointer at = stage.begin + half * kHalf + stage.mapped[half];
    if (driver.map(at, kSpan, 0, stage.handle, 0)) return false;
    const Access access{{kOnDevice, device}, kReadAndWrite};
    if (driver.access(at, kSpan, &access, 1)) return driver.unmap(at, kSpan), false;
    stage.mapped[half] += kSpan;
  }
  return true;
}

// Of this thread: the addresses that are left, or that they are those of a stage.
struct Addresses {
  const std::uint64_t* next = nullptr;
  const std::uint64_t* end = nullptr;
  bool on_stage = false;
  bool refused = false;
};
thread_local Addresses addresses;

}  // namespace

extern "C" {

// Returns the name of what the driver lacks, or null.
const char* fxwrap_placing_open(const char* library) { return open_driver(library); }

// An address on a device's stage for an operand of so many bytes, `offset` bytes from its begin; 0 if there is none.
std::uint64_t fxwrap_operand_on_stage(int device, std::uint64_t offset, std::uint64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  Stage& stage = stages[device];
  if (stage.begin == 0 && driver.reserve(&stage.begin, 2 * kHalf, 0, 0, 0)) return stage.begin = 0;
  return map_up_to(stage, device, 0, offset + nbytes) ? stage.begin + offset : 0;
}

// Gives the device's bytes back.
void fxwrap_clear_stage(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  Stage& stage = stages[device];
  for (int half = 0; half < 2; ++half) {
    for (; stage.mapped[half] > 0; stage.mapped[half] -= kSpan) {
      driver.unmap(stage.begin + half * kHalf + stage.mapped[half] - kSpan, kSpan);
    }
  }
  if (stage.handle != 0) driver.release(stage.handle);
  stage.handle = 0;
  stage.taken = 0;
}

void fxwrap_place_at(const std::uint64_t* first, std::size_t count) { addresses = {first, first + count}; }

void fxwrap_place_on_stage() { addresses = {nullptr, nullptr, true}; }

// Ends either. Returns how many addresses of the list were not used; -1 if more were asked for than there were.
std::int64_t fxwrap_end_placing() {
  const Addresses ended = addresses;
  addresses = {};
  return ended.refused ? -1 : ended.end - ended.next;
}

// torch's signatures. A null pointer is an error of "out of memory" there.
void* fxwrap_place(std::size_t size, int device, void*) {
  std::uint64_t address = 0;
  if (addresses.next != addresses.end) {
    address = *addresses.next++;
  } else if (addresses.on_stage) {
    std::lock_guard<std::mutex> lock(mutex);
    Stage& stage = stages[device];
    const size_t end = stage.taken + (size + kAlignment - 1) / kAlignment * kAlignment;
    if (stage.begin != 0 && map_up_to(stage, device, 1, end)) {
      address = stage.begin + kHalf + stage.taken;
      stage.taken = end;
    }
  }
  addresses.refused |= address == 0;
  return reinterpret_cast<void*>(address);
}

void fxwrap_unplace(void*, std::size_t, int, void*) {}
}
