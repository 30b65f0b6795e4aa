#pragma once

#include <cstddef>
#include <cstdint>

namespace backend {

// Over all graphs of the process. What runs as part of a replay is counted when it is issued; what is in the body of a
// branch or a loop, when it has run.
struct GraphCounters {
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t nodes_captured = 0; // with those in bodies
  int64_t nodes_replayed = 0;
  int64_t bodies_run = 0; // of branches, and for each iteration of loops
  int64_t live_graphs = 0; // captured and not reset
};

GraphCounters graph_counters();
// All but `live_graphs`, which is a state.
void reset_graph_counters();
// A body of so many nodes has run.
void count_body(size_t nodes);

} // namespace backend
