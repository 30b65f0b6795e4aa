#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace backend {

// Addresses that are decided outside of the allocator, for what one thread allocates while it captures a graph: of
// what was planned somewhere, or such that no memory is behind, where the graph is never to run. What is freed is used
// again, by the next that is not much smaller.
class Placing {
 public:
  explicit Placing(std::vector<uintptr_t> addresses) : addresses_(std::move(addresses)) {}
  // Addresses without memory, from this one on.
  explicit Placing(uintptr_t fresh) : fresh_(fresh) {}

  // An OutOfMemoryError if no address is left.
  uintptr_t take(size_t bytes);
  void give_back(uintptr_t address);

  // The address and the bytes of each allocation, in order.
  std::vector<std::pair<uintptr_t, size_t>> made();
  // Allocations that nobody has freed.
  size_t in_use();
  // Addresses that were not asked for.
  size_t left();

 private:
  uintptr_t fresh_address(size_t rounded);

  std::mutex mutex_; // A tensor may be freed by another thread.
  std::vector<uintptr_t> addresses_;
  uintptr_t fresh_ = 0;
  size_t next_ = 0;
  std::map<uintptr_t, size_t> sizes_; // When first given out, rounded up.
  std::multimap<size_t, uintptr_t> free_;
  std::vector<std::pair<uintptr_t, size_t>> made_;
  size_t in_use_ = 0;
};

// From now on it decides about this thread's allocations; none ends that.
void place_by(std::shared_ptr<Placing> placing);

// The first address without memory, and how many there are. The first half is the caller's to give out.
std::pair<uintptr_t, size_t> addresses_without_memory();

// Nothing where this thread does not place.
std::optional<c10::DataPtr> placed_memory(size_t bytes, c10::Device device);

} // namespace backend
