// Memory of regions that stays with the process between calls.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace fxwrap {

// Lends blocks of memory to the regions of calls, and keeps them afterwards for the next call of any program.
//
// The system's memory is zeroed page by page when it is first touched. The C library gives large blocks back to the
// system when they are freed, and the free end of its heap; so a call would pay for that again and again.
//
// A block is lent to one region at a time, so there are as many blocks as calls that ran at one time. Each is at most
// as large as the largest region that may ask for one.
class KeptMemory final : public c10::Allocator {
 public:
  // It is never destroyed: storages may be freed after everything else.
  static KeptMemory& all() {
    static auto* memory = new KeptMemory;
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto block = lent(bytes);
    if (!block) block.reset(new Block{c10::GetCPUAllocator()->allocate(bytes), bytes});
    auto* data = block->memory.get();
    return {data, block.release(), give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  // There is a region of this size from now on, or there is none any more.
  void expect(size_t bytes) {
    std::lock_guard lock(mutex_);
    expected_.insert(bytes);
  }
  void forget(size_t bytes) {
    Blocks freed;  // after the lock
    std::lock_guard lock(mutex_);
    expected_.erase(expected_.find(bytes));
    while (!blocks_.empty() && std::prev(blocks_.end())->first > most())
      freed.insert(blocks_.extract(std::prev(blocks_.end())));
  }

  // Bytes that no call uses.
  size_t idle() {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const auto& [size, block] : blocks_) bytes += size;
    return bytes;
  }

  // A child that is forked gets the lock as nobody holds it.
  static void survive_forks() {
    pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().mutex_.unlock(); });
  }

 private:
  struct Block {
    c10::DataPtr memory;
    size_t bytes;
  };
  using Blocks = std::multimap<size_t, std::unique_ptr<Block>>;

  // The smallest block that is large enough. If there are only smaller ones, a larger one will take the place of the
  // largest.
  std::unique_ptr<Block> lent(size_t bytes) {
    std::unique_ptr<Block> smaller;  // freed after the lock
    std::lock_guard lock(mutex_);
    if (blocks_.empty()) return nullptr;
    auto found = blocks_.lower_bound(bytes);
    const bool suits = found != blocks_.end();
    auto block = std::move(blocks_.extract(suits ? found : std::prev(found)).mapped());
    if (suits) return block;
    smaller = std::move(block);
    return nullptr;
  }

  static void give_back(void* lent) {
    std::unique_ptr<Block> block(static_cast<Block*>(lent));
    auto& memory = all();
    const auto bytes = block->bytes;
    std::lock_guard lock(memory.mutex_);
    auto& blocks = memory.blocks_;  // the last that came back, of one size, is lent first: caches may still have it
    if (bytes <= memory.most()) blocks.emplace_hint(blocks.lower_bound(bytes), bytes, std::move(block));
  }

  size_t most() const { return expected_.empty() ? 0 : *expected_.rbegin(); }

  std::mutex mutex_;
  Blocks blocks_;
  std::multiset<size_t> expected_;  // sizes
};

// A region whose memory is kept between calls, as long as this exists.
class KeptRegion {
 public:
  explicit KeptRegion(size_t bytes)
      : bytes_(bytes),
        storage_(c10::Storage::use_byte_size_t(), 0, KeptMemory::all().allocate(0), &KeptMemory::all(), true) {
    KeptMemory::all().expect(bytes_);
  }
  KeptRegion(const KeptRegion&) = delete;
  KeptRegion& operator=(const KeptRegion&) = delete;
  ~KeptRegion() { KeptMemory::all().forget(bytes_); }
  const c10::Storage& storage() const { return storage_; }

 private:
  size_t bytes_;
  c10::Storage storage_;
};

}  // namespace fxwrap
