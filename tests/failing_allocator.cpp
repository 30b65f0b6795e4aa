// The CPU's allocator, whose k-th allocation fails, and that knows how many bytes are in use.
// tests/faults.py builds and loads it.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <atomic>

namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> left{0}, counted{0}, failed{0}, in_use{0};
std::atomic<bool> and_all_after{false};

void count(size_t bytes) {
  if (bytes == 0 || !armed) return;
  ++counted;
  const auto now = left--;
  if (now == 0 || (now < 0 && and_all_after)) {
    ++failed;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "planted: ", bytes, " bytes are not to be had");
  }
}

void free_counted(void* memory) {
  if (memory == nullptr) return;
  in_use -= static_cast<int64_t>(malloc_usable_size(memory));
  c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
}

struct OfTheCpu final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    count(bytes);
    auto memory = c10::GetDefaultCPUAllocator()->allocate(bytes);
    auto* at = memory.release_context();
    if (at != nullptr) in_use += static_cast<int64_t>(malloc_usable_size(at));
    return {at, at, free_counted, memory.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_counted; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

extern "C" {

void install() {
  static OfTheCpu cpu;
  c10::SetCPUAllocator(&cpu, 100);
}

// The allocation `at` (0: the first) fails; a negative number: none does.
void arm(int64_t at, bool all_after) {
  left = at < 0 ? INT64_MAX : at;
  and_all_after = all_after;
  counted = failed = 0;
  armed = true;
}

void disarm() { armed = false; }
int64_t allocations() { return counted; }
int64_t failures() { return failed; }
int64_t bytes_in_use() { return in_use; }
}
