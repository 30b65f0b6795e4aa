// Conditional nodes: their condition, and which of their bodies runs.
// Programming Guide, "CUDA Graphs", "Conditional Graph Nodes".
#pragma once
#include "streams.h"

namespace hostcuda {

// What a cudaGraphConditionalHandle stands for. Its value is that of the launch that runs: executable graphs with
// conditional nodes exist once, and one launch runs at a time.
struct Condition {
  cudaGraphConditionalHandle handle;
  Graph* graph; // for which it was created; null when that is gone
  unsigned initial;
  bool assigned;     // cudaGraphCondAssignDefault: every launch begins with the initial value
  bool used = false; // by a conditional node
  bool executing = false, defined = false;
  unsigned value = 0;
};
struct Conditional {
  std::shared_ptr<Condition> condition;
  cudaGraphConditionalNodeType type;
  std::vector<cudaGraph_t> bodies; // cudaGraphNodeParams has this array; the graphs are their parent's
};

// With the mutex held:
std::shared_ptr<Condition> condition_of(cudaGraphConditionalHandle handle); // null where there is none
cudaError_t make_conditional(Graph& graph, cudaConditionalNodeParams& params, Node& node);

// While work runs:
void set_condition(Condition& condition, unsigned value); // cudaGraphSetConditional
void run_conditional(const Conditional& node, const std::function<void(size_t body)>& run);
class Execution { // of a graph with these conditions
 public:
  explicit Execution(const std::vector<std::shared_ptr<Condition>>& conditions);
  ~Execution();

 private:
  const std::vector<std::shared_ptr<Condition>>& conditions_;
};

} // namespace hostcuda
