#include "rules.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace backend {

namespace {

constexpr size_t kRules = static_cast<size_t>(Rule::kCount);

std::array<std::atomic<bool>, kRules> relaxed{};

} // namespace

// In the order of the enumeration.
const std::array<RuleDescription, kRules> rule_table{{
    {"pool_dies_with_its_last_graph",
     "a pool whose last graph is gone takes no other one, until the caches of device memory and of pinned memory have "
     "both been emptied",
     "c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool: use_count > 0, and ATen/core/CachingHostAllocator.h, "
     "create_or_incref_pool_under_lock; torch 2.11 to 2.15"},
    {"failed_capture_holds_its_pool",
     "a capture that ends with an error goes on recording to its pool: no other capture may use it, and the cache "
     "cannot be emptied, until end_allocate_to_pool and release_pool are called",
     "ATen/cuda/CUDAGraph.cpp, capture_end: cudaStreamEndCapture throws before endAllocateToPool, and reset releases "
     "the pool of a capture that has ended only; torch 2.11 to 2.13 (2.15 ends it first, and reset releases it)"},
    {"failed_capture_spoils_its_pool",
     "a pool in which a capture has failed takes no other one, even when it was put right",
     "ATen/core/CachingHostAllocator.h, begin_allocate_to_pool: the allocator of pinned memory still records to it, "
     "which nobody can end from Python; torch 2.11 to 2.13 (2.15 ends it first)"},
    {"failed_capture_holds_generators",
     "after a capture that ends with an error, generators draw nothing outside of captures until another one ends well",
     "ATen/cuda/CUDAGraph.cpp, capture_end: it throws before capture_epilogue; torch 2.11 (later, reset does it)"},
    {"workspace_belongs_to_thread_and_stream",
     "products use a workspace of the thread and stream that issue them, and a graph captures its address: graphs "
     "captured on one stream must not run at one time (seen where work is asynchronous)",
     "ATen/cuda/CublasHandlePool.cpp, getCurrentCUDABlasHandle: workspaces by handle and stream; torch 2.11 to 2.15"},
    {"libraries_begin_outside_of_captures",
     "a thread's first product makes a library's handle, which allocates: a capture in which that happens fails, "
     "unless it is relaxed",
     "ATen/cuda/CublasHandlePool.cpp, createCublasHandle: cublasCreate, for each thread; torch 2.11 to 2.15"},
    {"cache_stays_while_capturing",
     "as long as a capture records to a memory pool, memory that is short is not won by giving back what the cache "
     "has: allocations fail, of whoever captures and of everybody else on the device",
     "c10/cuda/CUDACachingAllocator.cpp, malloc: release_cached_blocks only if captures_underway.empty(); torch 2.11 "
     "(2.14.1 looks at the stream that asks: others empty the cache)"},
}};

bool in_force(Rule rule) {
  return !relaxed[static_cast<size_t>(rule)].load(std::memory_order_relaxed);
}

void relax(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < kRules; ++i) {
    if (name == rule_table[i].name) {
      relaxed[i] = true;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(rule_table[i].name);
  }
  TORCH_CHECK_VALUE(false, "no rule is called '", name, "'; there are: ", known);
}

void enforce_all_rules() {
  for (auto& rule : relaxed) {
    rule = false;
  }
}

std::vector<std::string> relaxed_rules() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kRules; ++i) {
    if (relaxed[i]) {
      names.emplace_back(rule_table[i].name);
    }
  }
  return names;
}

} // namespace backend
