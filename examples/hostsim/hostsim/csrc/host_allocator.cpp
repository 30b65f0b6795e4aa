#include "host_allocator.h"

#include "allocator.h"

#include "capture.h"
#include "devices.h"
#include "streams.h"

#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace backend {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallest = 512;

struct PinnedBlock {
  void* data;
  size_t bytes;
  int users = 0; // The tensor, and copies that have not run yet.
};

// Host memory is always reachable for this device. What "pinned" adds is that the allocator knows of the copies in
// flight, so that they may be asynchronous.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
  bool record_event(void* pointer, void* context, c10::Stream stream) override;
  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  void add_user(PinnedBlock* block);
  void remove_user(PinnedBlock* block);
  PinnedBlock* find(const void* address);

 private:
  std::array<at::Stat*, 4> all_statistics() {
    return {
        &statistics_.allocations,
        &statistics_.active_requests,
        &statistics_.allocated_bytes,
        &statistics_.active_bytes};
  }

  std::mutex mutex_;
  std::map<uintptr_t, std::unique_ptr<PinnedBlock>> blocks_;
  std::multimap<size_t, PinnedBlock*> free_;
  at::HostStats statistics_;
};

// Not destroyed at exit: tensors may be freed later.
PinnedAllocator& allocator() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

void delete_pinned(void* data) {
  if (auto* block = allocator().find(data)) {
    allocator().remove_user(block);
  }
}

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  const c10::Device device(c10::DeviceType::CPU);
  if (bytes == 0) {
    return {nullptr, nullptr, &delete_pinned, device};
  }
  const size_t rounded = std::max<size_t>(kSmallest, c10::llvm::PowerOf2Ceil(bytes));
  std::lock_guard<std::mutex> lock(mutex_);
  PinnedBlock* block = nullptr;
  const auto found = free_.find(rounded);
  if (found != free_.end()) {
    block = found->second;
    free_.erase(found);
  } else {
    void* data = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        posix_memalign(&data, kAlignment, rounded) == 0,
        "no ",
        bytes,
        " bytes of pinned memory left");
    auto created = std::make_unique<PinnedBlock>(PinnedBlock{data, rounded});
    block = created.get();
    blocks_[reinterpret_cast<uintptr_t>(data)] = std::move(created);
    statistics_.allocations.increase(1);
    statistics_.allocated_bytes.increase(rounded);
    ++statistics_.num_host_alloc;
  }
  block->users = 1;
  statistics_.active_requests.increase(1);
  statistics_.active_bytes.increase(rounded);
  return {block->data, block->data, &delete_pinned, device};
}

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const {
  return &delete_pinned;
}

void PinnedAllocator::add_user(PinnedBlock* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++block->users;
}

void PinnedAllocator::remove_user(PinnedBlock* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--block->users == 0) {
    statistics_.active_requests.decrease(1);
    statistics_.active_bytes.decrease(block->bytes);
    free_.emplace(block->bytes, block);
  }
}

PinnedBlock* PinnedAllocator::find(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto key = reinterpret_cast<uintptr_t>(address);
  const auto above = blocks_.upper_bound(key);
  if (above == blocks_.begin()) {
    return nullptr;
  }
  PinnedBlock* block = std::prev(above)->second.get();
  return key < reinterpret_cast<uintptr_t>(block->data) + block->bytes ? block : nullptr;
}

bool PinnedAllocator::record_event(void* pointer, void*, c10::Stream stream) {
  auto token = keep_pinned(pointer);
  if (!token) {
    return false;
  }
  if (auto capture = capture_of(stream)) {
    capture->keep(std::move(token));
  } else {
    issue(stream, {"use of pinned memory", [token = std::move(token)] {}});
  }
  return true;
}

void PinnedAllocator::empty_cache() {
  pinned_cache_emptied();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [bytes, block] : std::exchange(free_, {})) {
    statistics_.allocations.decrease(1);
    statistics_.allocated_bytes.decrease(bytes);
    ++statistics_.num_host_free;
    std::free(block->data);
    blocks_.erase(reinterpret_cast<uintptr_t>(block->data));
  }
}

at::HostStats PinnedAllocator::get_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void PinnedAllocator::reset_accumulated_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (at::Stat* statistic : all_statistics()) {
    statistic->reset_accumulated();
  }
  statistics_.num_host_alloc = 0;
  statistics_.num_host_free = 0;
}

void PinnedAllocator::reset_peak_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (at::Stat* statistic : all_statistics()) {
    statistic->reset_peak();
  }
}

} // namespace

at::HostAllocator* host_allocator() {
  return &allocator();
}

bool is_pinned(const void* address) {
  return allocator().find(address) != nullptr;
}

std::shared_ptr<void> keep_pinned(const void* address) {
  PinnedBlock* block = allocator().find(address);
  if (block == nullptr) {
    return nullptr;
  }
  allocator().add_user(block);
  return {block, [](void* kept) { allocator().remove_user(static_cast<PinnedBlock*>(kept)); }};
}

} // namespace backend

namespace at {

REGISTER_HOST_ALLOCATOR(backend::kDevice, backend::host_allocator())

} // namespace at
