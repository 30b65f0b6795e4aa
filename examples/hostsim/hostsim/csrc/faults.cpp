#include "faults.h"

#include <c10/util/Exception.h>

namespace backend {

namespace {

constexpr size_t kFaults = static_cast<size_t>(Fault::kCount);

std::array<std::atomic<bool>, kFaults> switches{};

} // namespace

// In the order of the enumeration.
const std::array<FaultDescription, kFaults> fault_table{{
    {"replay_ignores_refilled_inputs", "replays read what their inputs held at the first replay"},
    {"replay_skips_last_node", "replays leave out the last node"},
    {"replay_on_default_stream", "replays go to the default stream, in no order with the current one"},
    {"generator_not_advanced", "every replay draws the numbers of the first again"},
    {"pool_not_shared", "a pool id given to a capture is ignored"},
    {"pool_memory_not_kept", "memory freed while capturing is handed to work outside of the graph"},
    {"capture_allows_item", "a value read on the host while capturing is whatever the memory holds"},
    {"capture_allows_synchronize", "synchronising while capturing is not refused"},
    {"capture_allows_pageable_copy", "copies from and to pageable memory while capturing are not refused"},
    {"capture_on_default_stream_allowed", "the default stream can be captured"},
    {"recapture_without_reset_allowed", "a second capture of a graph replaces the first"},
    {"unjoined_fork_allowed", "a capture may end while a stream forked from it has not been joined"},
    {"events_do_not_wait", "a stream told to wait for an event goes on"},
    {"record_stream_ignored", "memory in use on another stream is reused as soon as it is freed"},
    {"no_poison", "fresh memory holds zeros"},
    {"storage_offset_dropped", "copies start at the beginning of the storage"},
    {"non_blocking_copy_too_late", "asynchronous copies run late, and their stream does not wait for them"},
    {"branch_always_runs", "the body of a branch runs whatever its predicate is"},
    {"loop_runs_once", "the body of a loop runs once, if at all"},
}};

bool planted(Fault fault) {
  return switches[static_cast<size_t>(fault)].load(std::memory_order_relaxed);
}

void plant_fault(const std::string& name) {
  for (size_t i = 0; i < kFaults; ++i) {
    if (name == fault_table[i].name) {
      switches[i] = true;
      return;
    }
  }
  std::string known;
  for (const auto& fault : fault_table) {
    known += (known.empty() ? "" : ", ") + std::string(fault.name);
  }
  TORCH_CHECK_VALUE(false, "no fault is called '", name, "'; there are: ", known);
}

void clear_faults() {
  for (auto& fault : switches) {
    fault = false;
  }
}

std::vector<std::string> planted_faults() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kFaults; ++i) {
    if (switches[i]) {
      names.emplace_back(fault_table[i].name);
    }
  }
  return names;
}

} // namespace backend
