#include "allocator.h"

#include "capture.h"
#include "events.h"
#include "faults.h"
#include "name.h"
#include "placements.h"
#include "rules.h"
#include "streams.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace backend {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kGranularity = 512;
constexpr int kPoisonByte = 0xFF;
constexpr MempoolId_t kOrdinaryPool{0, 0};

std::atomic<bool> poison_everywhere{environment_flag(DEVICE_ENVIRONMENT("POISON"))};
std::atomic<unsigned long long> pool_counter{0};

struct Block {
  uint64_t id;
  void* data;
  size_t bytes;
  size_t requested = 0;
  c10::DeviceIndex device;
  c10::Stream stream; // On which it was allocated: whoever gets it next on this stream comes after its last use.
  MempoolId_t pool;
  bool in_use = false;
  std::set<c10::StreamId> used_on = {}; // Other streams, which its reuse has to wait for.
};

// Free blocks of one device, pool and stream, by size.
using FreeBlocks = std::multimap<size_t, Block*>;
using FreeKey = std::tuple<c10::DeviceIndex, MempoolId_t, c10::StreamId>;

using Statistics = c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  bool initialized() override {
    return true;
  }
  void emptyCache(MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  Statistics getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  void free(void* data);
  void retain_pool(MempoolId_t pool);
  void end_allocate_to_pool(MempoolId_t pool);
  void release_pool(MempoolId_t pool);
  void pinned_cache_emptied();
  PoolStatistics pool_statistics(MempoolId_t pool);
  void set_memory_fraction(double fraction, c10::DeviceIndex device);
  double memory_fraction(c10::DeviceIndex device);
  std::optional<Block> find(const void* address);
  void capture_ended();

 private:
  Block* reuse(const FreeKey& key, size_t bytes);
  Block* reserve(const FreeKey& key, const c10::Stream& stream, size_t bytes);
  size_t reserved(c10::DeviceIndex device) const;
  size_t allowed(c10::DeviceIndex device) const;
  void check_memory_is_left(c10::DeviceIndex device, size_t bytes);
  bool recorded_on(c10::DeviceIndex device) const;
  void return_block(Block* block);
  void return_free_blocks(const MempoolId_t& pool, c10::DeviceIndex device);
  void return_cache(c10::DeviceIndex device, const MempoolId_t& pool);
  void make_reusable(Block* block);
  void make_reusable_when_done(Block* block);
  void collect_finished();
  bool kept(const MempoolId_t& pool) const;
  void forget_if_empty(const MempoolId_t& pool);

  std::mutex mutex_;
  uint64_t next_id_ = 1;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_; // By address, to find the one an address lies in.
  std::map<FreeKey, FreeBlocks> free_;
  // Freed, but other streams may still use them.
  std::vector<std::pair<Block*, std::vector<std::shared_ptr<Event>>>> pending_;
  // Freed while a stream that used them was captured: nothing in time could be waited for.
  std::vector<Block*> held_back_;
  std::map<MempoolId_t, PoolStatistics> pools_;
  std::map<MempoolId_t, c10::DeviceIndex> recorded_to_; // By captures, on which device.
  std::set<MempoolId_t> dead_pools_; // Whose last graph has gone since the cache of pinned memory was emptied.
  std::vector<Statistics> statistics_{static_cast<size_t>(device_count())};
  std::vector<double> fractions_ = std::vector<double>(static_cast<size_t>(device_count()), 1.0);
};

// Not destroyed at exit: tensors may be freed later.
CachingAllocator& allocator() {
  static auto* instance = new CachingAllocator();
  return *instance;
}

void delete_block(void* data) {
  allocator().free(data);
}

// Of each device: all of the machine's.
size_t total_memory() {
  static const size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t round_up(size_t bytes) {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

// Of memory that has just been handed out.
void fill_with_poison(const Block& block, bool captured, bool fresh) {
  void* data = block.data;
  const size_t bytes = block.bytes;
  const int byte = planted(Fault::kNoPoison) ? 0 : kPoisonByte;
  if (captured) {
    // At once, for nothing that is recorded runs before a replay. Memory that has been used before may belong to a
    // graph of the same pool which is still running: then it is left alone.
    if (fresh || device_idle(block.device)) {
      std::memset(data, byte, bytes);
    }
  } else if (poison_everywhere) {
    queue_of(block.stream).push({"poison", [data, bytes, byte] { std::memset(data, byte, bytes); }});
  }
}

// Allocations that are left before one fails; negative once it has, or where none shall.
std::atomic<int64_t> left_before_failure{-1};
std::atomic<bool> all_after_fail{false};
std::atomic<int64_t> wanted{0};

void fail_if_planted(size_t bytes) {
  ++wanted;
  if (left_before_failure < 0 || left_before_failure-- > 0) {
    return;
  }
  if (all_after_fail) {
    left_before_failure = 0;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, DEVICE_NAME, ": planted: ", bytes, " bytes are not to be had");
}

c10::DataPtr CachingAllocator::allocate(size_t bytes) {
  const c10::DeviceIndex index = current_device();
  const c10::Device device(kDevice, index);
  if (bytes == 0) {
    return {nullptr, nullptr, &delete_block, device};
  }
  fail_if_planted(bytes);
  if (auto placed = placed_memory(bytes, device)) {
    return std::move(*placed); // Somebody else's block: it is neither counted nor filled here.
  }
  const c10::Stream stream = current_stream(index);
  const auto capture = capture_of(stream);
  const FreeKey key{index, capture ? capture->pool() : kOrdinaryPool, stream.id()};
  Block* block = nullptr;
  bool fresh = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    collect_finished();
    block = reuse(key, round_up(bytes));
    if (block == nullptr) {
      const bool may_return = !recorded_on(index) || !in_force(Rule::kCacheStaysWhileCapturing);
      if (reserved(index) + round_up(bytes) > allowed(index) && may_return) {
        // What is queued may still use blocks that have been freed, and may free others.
        lock.unlock();
        drain_device(index);
        lock.lock();
        return_cache(index, kOrdinaryPool);
      }
      block = reserve(key, stream, round_up(bytes));
      fresh = true;
    }
    block->in_use = true;
    block->requested = bytes;
    PoolStatistics& pool = pools_[block->pool];
    pool.allocated += block->bytes;
    pool.peak_allocated = std::max(pool.peak_allocated, pool.allocated);
    ++pool.blocks;
    ++pool.allocations;
    Statistics& statistics = statistics_[index];
    statistics.allocation[kAggregate].increase(1);
    statistics.active[kAggregate].increase(1);
    statistics.allocated_bytes[kAggregate].increase(block->bytes);
    statistics.active_bytes[kAggregate].increase(block->bytes);
    statistics.requested_bytes[kAggregate].increase(bytes);
  }
  fill_with_poison(*block, capture != nullptr, fresh);
  return {block->data, block->data, &delete_block, device};
}

// The smallest free block that is large enough, unless most of it would be wasted.
Block* CachingAllocator::reuse(const FreeKey& key, size_t bytes) {
  FreeBlocks& candidates = free_[key];
  const auto found = candidates.lower_bound(bytes);
  if (found == candidates.end() || found->first > 2 * bytes) {
    return nullptr;
  }
  Block* block = found->second;
  candidates.erase(found);
  return block;
}

size_t CachingAllocator::reserved(c10::DeviceIndex device) const {
  return static_cast<size_t>(statistics_[device].reserved_bytes[kAggregate].current);
}

size_t CachingAllocator::allowed(c10::DeviceIndex device) const {
  return static_cast<size_t>(fractions_[device] * static_cast<double>(total_memory()));
}

// A capture on another device forbids nothing.
bool CachingAllocator::recorded_on(c10::DeviceIndex device) const {
  return std::any_of(
      recorded_to_.begin(), recorded_to_.end(), [device](const auto& entry) { return entry.second == device; });
}

void CachingAllocator::check_memory_is_left(c10::DeviceIndex device, size_t bytes) {
  if (reserved(device) + bytes <= allowed(device)) {
    return;
  }
  Statistics& statistics = statistics_[device];
  ++statistics.num_ooms;
  const auto in_use = static_cast<size_t>(statistics.allocated_bytes[kAggregate].current);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      DEVICE_NAME,
      ":",
      static_cast<int>(device),
      " is out of memory: ",
      bytes,
      " bytes are wanted, and of ",
      allowed(device),
      " that this process may have, ",
      in_use,
      " are in use and ",
      reserved(device) - in_use,
      recorded_on(device) ? " are kept by the cache and by pools while a graph is captured"
                          : " are kept for graphs or belong to what still runs");
}

Block* CachingAllocator::reserve(const FreeKey& key, const c10::Stream& stream, size_t bytes) {
  const auto& [device, pool, stream_id] = key;
  check_memory_is_left(device, bytes);
  Statistics& statistics = statistics_[device];
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) {
    ++statistics.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, DEVICE_NAME, ":", static_cast<int>(device), " has no ", bytes, " bytes left");
  }
  auto block = std::make_unique<Block>(Block{next_id_++, data, bytes, 0, device, stream, pool});
  Block* result = block.get();
  blocks_[reinterpret_cast<uintptr_t>(data)] = std::move(block);
  PoolStatistics& pool_statistics = pools_[pool];
  pool_statistics.reserved += bytes;
  pool_statistics.peak_reserved = std::max(pool_statistics.peak_reserved, pool_statistics.reserved);
  statistics.segment[kAggregate].increase(1);
  statistics.reserved_bytes[kAggregate].increase(bytes);
  ++statistics.num_device_alloc;
  return result;
}

void CachingAllocator::return_block(Block* block) {
  pools_[block->pool].reserved -= block->bytes;
  Statistics& statistics = statistics_[block->device];
  statistics.segment[kAggregate].decrease(1);
  statistics.reserved_bytes[kAggregate].decrease(block->bytes);
  ++statistics.num_device_free;
  std::free(block->data);
  blocks_.erase(reinterpret_cast<uintptr_t>(block->data));
}

void CachingAllocator::free(void* data) {
  if (data == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = blocks_.at(reinterpret_cast<uintptr_t>(data)).get();
  block->in_use = false;
  PoolStatistics& pool = pools_[block->pool];
  pool.allocated -= block->bytes;
  --pool.blocks;
  Statistics& statistics = statistics_[block->device];
  statistics.allocation[kAggregate].decrease(1);
  statistics.allocated_bytes[kAggregate].decrease(block->bytes);
  statistics.requested_bytes[kAggregate].decrease(block->requested);
  make_reusable_when_done(block);
}

void CachingAllocator::make_reusable_when_done(Block* block) {
  if (block->used_on.empty()) {
    make_reusable(block);
    return;
  }
  std::vector<c10::Stream> streams;
  bool captured = capture_of(block->stream) != nullptr;
  for (const c10::StreamId id : block->used_on) {
    streams.emplace_back(c10::Stream::UNSAFE, c10::Device(kDevice, block->device), id);
    captured = captured || capture_of(streams.back());
  }
  if (captured) {
    held_back_.push_back(block);
    return;
  }
  block->used_on.clear();
  std::vector<std::shared_ptr<Event>> events;
  for (const c10::Stream& stream : streams) {
    events.push_back(std::make_shared<Event>(block->device));
    events.back()->record(stream);
  }
  pending_.emplace_back(block, std::move(events));
  collect_finished();
}

void CachingAllocator::collect_finished() {
  for (size_t i = 0; i < pending_.size();) {
    auto& events = pending_[i].second;
    if (std::all_of(events.begin(), events.end(), [](const auto& event) { return event->passed(); })) {
      Block* block = pending_[i].first;
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      make_reusable(block);
    } else {
      ++i;
    }
  }
}

bool CachingAllocator::kept(const MempoolId_t& pool) const {
  const auto found = pools_.find(pool);
  return pool == kOrdinaryPool || (found != pools_.end() && found->second.graphs > 0);
}

void CachingAllocator::make_reusable(Block* block) {
  Statistics& statistics = statistics_[block->device];
  statistics.active[kAggregate].decrease(1);
  statistics.active_bytes[kAggregate].decrease(block->bytes);
  MempoolId_t pool = block->pool;
  if (planted(Fault::kPoolMemoryNotKept)) {
    pool = kOrdinaryPool;
  }
  // An output of a graph that is gone: nobody allocates from its pool any more, so that an ordinary owner is best.
  // CUDA leaves it there until the cache is emptied.
  if (!kept(pool) && !in_force(Rule::kPoolDiesWithItsLastGraph)) {
    pool = kOrdinaryPool;
  }
  if (pool != block->pool) {
    pools_[block->pool].reserved -= block->bytes;
    PoolStatistics& ordinary = pools_[pool];
    ordinary.reserved += block->bytes;
    ordinary.peak_reserved = std::max(ordinary.peak_reserved, ordinary.reserved);
    forget_if_empty(std::exchange(block->pool, pool));
  }
  free_[FreeKey{block->device, pool, block->stream.id()}].emplace(block->bytes, block);
}

void CachingAllocator::return_free_blocks(const MempoolId_t& pool, c10::DeviceIndex device) {
  for (auto& [key, blocks] : free_) {
    if (std::get<MempoolId_t>(key) == pool && std::get<c10::DeviceIndex>(key) == device) {
      for (const auto& [bytes, block] : blocks) {
        return_block(block);
      }
      blocks.clear();
    }
  }
}

void CachingAllocator::forget_if_empty(const MempoolId_t& pool) {
  const auto found = pools_.find(pool);
  if (found != pools_.end() && !kept(pool) && found->second.reserved == 0) {
    pools_.erase(found);
  }
}

void CachingAllocator::retain_pool(MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  TORCH_CHECK(
      kept(pool) || (found == pools_.end() && dead_pools_.count(pool) == 0) || !in_force(Rule::kPoolDiesWithItsLastGraph),
      "capture_begin: the last graph of this memory pool is gone, and the caches of device memory and of pinned memory "
      "have not both been emptied since: take another pool, or keep a graph of it for as long as it is used");
  TORCH_CHECK(
      recorded_to_.emplace(pool, current_device()).second,
      "capture_begin: another capture records to this memory pool, or has failed and was not put right");
  dead_pools_.erase(pool);
  ++pools_[pool].graphs;
}

void CachingAllocator::end_allocate_to_pool(MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(recorded_to_.erase(pool) != 0, "end_allocate_to_pool: no capture records to this memory pool");
}

void CachingAllocator::release_pool(MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(pools_.count(pool) != 0 && pools_[pool].graphs > 0, "release_pool: nobody keeps this memory pool");
  if (--pools_[pool].graphs == 0) {
    if (!in_force(Rule::kPoolDiesWithItsLastGraph)) {
      for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
        return_free_blocks(pool, device);
      }
    }
    forget_if_empty(pool);
    dead_pools_.insert(pool);
  }
}

void CachingAllocator::pinned_cache_emptied() {
  std::lock_guard<std::mutex> lock(mutex_);
  dead_pools_.clear();
}

PoolStatistics CachingAllocator::pool_statistics(MempoolId_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  return found == pools_.end() ? PoolStatistics() : found->second;
}

std::optional<Block> CachingAllocator::find(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto key = reinterpret_cast<uintptr_t>(address);
  auto above = blocks_.upper_bound(key);
  if (above == blocks_.begin()) {
    return std::nullopt;
  }
  const Block& block = *std::prev(above)->second;
  return key < reinterpret_cast<uintptr_t>(block.data) + block.bytes ? std::optional<Block>(block) : std::nullopt;
}

void CachingAllocator::capture_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Block* block : std::exchange(held_back_, {})) {
    make_reusable_when_done(block);
  }
}

c10::DeleterFnPtr CachingAllocator::raw_deleter() const {
  return &delete_block;
}

void CachingAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  issue(
      current_stream(current_device()),
      {"memory copy",
       [destination, source, bytes] { std::memmove(destination, source, bytes); },
       {{const_cast<void*>(source), bytes, false}, {destination, bytes, true}}});
}

void CachingAllocator::emptyCache(MempoolId_t pool) {
  // What is queued may still use blocks that have been freed.
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    for (const auto& stream : streams_of(device)) {
      check_host_may_wait(HostWait::kSynchronize, "emptying the cache", stream);
    }
    drain_device(device);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      recorded_to_.empty(), "emptying the cache: a capture records to a memory pool, or has failed and was not put right");
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    return_cache(device, pool);
  }
}

// What is free on a device and belongs to no graph; `pool` tells whether the ordinary pool is meant, too.
void CachingAllocator::return_cache(c10::DeviceIndex device, const MempoolId_t& pool) {
  collect_finished();
  std::vector<MempoolId_t> without_graphs;
  for (const auto& [id, statistics] : pools_) {
    if (id == kOrdinaryPool ? pool == kOrdinaryPool : !kept(id)) {
      without_graphs.push_back(id);
    }
  }
  for (const MempoolId_t& id : without_graphs) {
    return_free_blocks(id, device);
    forget_if_empty(id);
  }
}

void CachingAllocator::set_memory_fraction(double fraction, c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(
      fraction >= 0 && fraction <= 1, "the fraction of a device's memory has to be from 0 to 1, not ", fraction);
  std::lock_guard<std::mutex> lock(mutex_);
  fractions_[checked_device(device)] = fraction;
}

double CachingAllocator::memory_fraction(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return fractions_[checked_device(device)];
}

void CachingAllocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (pointer.get() == nullptr || planted(Fault::kRecordStreamIgnored)) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer.get_context()));
  if (found != blocks_.end() && found->second->stream != stream) {
    found->second->used_on.insert(stream.id());
  }
}

Statistics CachingAllocator::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_[checked_device(device)];
}

template <typename Reset>
void for_every_statistic(Statistics& statistics, Reset reset) {
  for (auto* array :
       {&statistics.allocation,
        &statistics.segment,
        &statistics.active,
        &statistics.allocated_bytes,
        &statistics.reserved_bytes,
        &statistics.active_bytes,
        &statistics.requested_bytes}) {
    for (auto& statistic : *array) {
      reset(statistic);
    }
  }
}

void CachingAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  Statistics& statistics = statistics_[checked_device(device)];
  for_every_statistic(statistics, [](auto& statistic) { statistic.reset_accumulated(); });
  statistics.num_ooms = 0;
  statistics.num_device_alloc = 0;
  statistics.num_device_free = 0;
}

void CachingAllocator::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for_every_statistic(statistics_[checked_device(device)], [](auto& statistic) { statistic.reset_peak(); });
}

std::pair<size_t, size_t> CachingAllocator::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex_);
  // What others on this machine have is none of the device's: all of its memory is this process's.
  const size_t mine = reserved(checked_device(device));
  return {total_memory() - std::min(mine, total_memory()), total_memory()};
}

// Torch finds the allocator as soon as the library is loaded.
const bool registered = (c10::SetAllocator(kDevice, &allocator()), true);

} // namespace

c10::DeviceAllocator* device_allocator() {
  return &allocator();
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  // As CUDA does: memory that is a slice of somebody else's stays where it is.
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  OnDevice guard(storage->device().index());
  c10::DataPtr fresh = allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept != 0) {
    allocator().copy_data(fresh.get(), storage->data_ptr().get(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

MempoolId_t pool_for_graph() {
  return {++pool_counter, 0};
}

MempoolId_t pool_handle() {
  return {0, ++pool_counter};
}

void retain_pool(MempoolId_t pool) {
  allocator().retain_pool(pool);
}

void end_allocate_to_pool(MempoolId_t pool) {
  allocator().end_allocate_to_pool(pool);
}

void release_pool(MempoolId_t pool) {
  allocator().release_pool(pool);
}

PoolStatistics pool_statistics(MempoolId_t pool) {
  return allocator().pool_statistics(pool);
}

void set_memory_fraction(double fraction, c10::DeviceIndex device) {
  allocator().set_memory_fraction(fraction, device);
}

void fail_allocations(int64_t at, bool all_after) {
  all_after_fail = all_after;
  wanted = 0;
  left_before_failure = at;
}

int64_t allocations_wanted() {
  return wanted;
}

double memory_fraction(c10::DeviceIndex device) {
  return allocator().memory_fraction(device);
}

uint64_t block_at(const void* address) {
  const auto block = allocator().find(address);
  return block ? block->id : 0;
}

MempoolId_t pool_at(const void* address) {
  const auto block = allocator().find(address);
  return block ? block->pool : kOrdinaryPool;
}

c10::DeviceIndex device_at(const void* address) {
  const auto block = allocator().find(address);
  return block ? block->device : static_cast<c10::DeviceIndex>(-1);
}

void pinned_cache_emptied() {
  allocator().pinned_cache_emptied();
}

void capture_ended() {
  allocator().capture_ended();
}

void set_poison(bool value) {
  poison_everywhere = value;
}

bool poison() {
  return poison_everywhere;
}

} // namespace backend
