#pragma once

#include <cstdint>

namespace backend {

// Over all graphs of the process. What runs as part of a replay is counted when it is issued.
struct GraphCounters {
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t nodes_captured = 0;
  int64_t nodes_replayed = 0;
  int64_t live_graphs = 0; // captured and not reset
};

GraphCounters graph_counters();
// All but `live_graphs`, which is a state.
void reset_graph_counters();

} // namespace backend
