#include "placements.h"

#include "name.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>

namespace backend {

namespace {

constexpr size_t kGranularity = 512;
constexpr size_t kWithoutMemory = size_t(1) << 40;

thread_local std::shared_ptr<Placing> current;

struct Block {
  std::shared_ptr<Placing> placing;
  uintptr_t address;
};

void free_placed(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->placing->give_back(block->address);
}

} // namespace

uintptr_t Placing::take(size_t bytes) {
  const size_t rounded = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  std::lock_guard<std::mutex> lock(mutex_);
  uintptr_t address = 0;
  if (const auto found = free_.lower_bound(rounded); found != free_.end() && found->first <= 2 * rounded) {
    address = found->second;
    free_.erase(found);
  } else {
    address = fresh_ != 0 ? fresh_address(rounded) : next_ < addresses_.size() ? addresses_[next_++] : 0;
    TORCH_CHECK_WITH(
        OutOfMemoryError, address != 0, DEVICE_NAME, ": ", bytes, " bytes more are wanted, and no address is left");
    sizes_[address] = rounded;
  }
  made_.emplace_back(address, bytes);
  ++in_use_;
  return address;
}

uintptr_t Placing::fresh_address(size_t rounded) {
  const auto [begin, count] = addresses_without_memory();
  if (rounded > begin + count - fresh_) {
    return 0;
  }
  return std::exchange(fresh_, fresh_ + rounded);
}

void Placing::give_back(uintptr_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.emplace(sizes_.at(address), address);
  --in_use_;
}

std::vector<std::pair<uintptr_t, size_t>> Placing::made() {
  std::lock_guard<std::mutex> lock(mutex_);
  return made_;
}

size_t Placing::in_use() {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

size_t Placing::left() {
  std::lock_guard<std::mutex> lock(mutex_);
  return addresses_.size() - next_;
}

void place_by(std::shared_ptr<Placing> placing) {
  current = std::move(placing);
}

std::pair<uintptr_t, size_t> addresses_without_memory() {
  static void* const reserved =
      mmap(nullptr, kWithoutMemory, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(reserved != MAP_FAILED, DEVICE_NAME, ": addresses without memory cannot be reserved");
  return {reinterpret_cast<uintptr_t>(reserved), kWithoutMemory};
}

std::optional<c10::DataPtr> placed_memory(size_t bytes, c10::Device device) {
  if (!current) {
    return std::nullopt;
  }
  const uintptr_t address = current->take(bytes);
  return c10::DataPtr(reinterpret_cast<void*>(address), new Block{current, address}, &free_placed, device);
}

} // namespace backend
