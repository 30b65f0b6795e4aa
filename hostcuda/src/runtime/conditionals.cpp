// Conditional handles, the nodes that they belong to, and what runs when such a node is reached.
// "Guide" is the CUDA Programming Guide, "CUDA Graphs", "Conditional Graph Nodes".
#include "conditionals.h"

#include <stdexcept>

namespace hostcuda {

namespace {
// Guide, "Conditional Handles": "Handles cannot be destroyed". They live as long as a graph or a launch needs them.
std::map<cudaGraphConditionalHandle, std::weak_ptr<Condition>>& handles() {
  static auto* all = new std::map<cudaGraphConditionalHandle, std::weak_ptr<Condition>>;
  return *all;
}
std::string name_of(const Condition& condition) { return "conditional handle " + std::to_string(condition.handle); }

// API, cudaConditionalNodeParams, size: "1 for cudaGraphCondTypeWhile, 1 or 2 for cudaGraphCondTypeIf, or any value
// greater than zero for cudaGraphCondTypeSwitch".
bool allowed(cudaGraphConditionalNodeType type, unsigned size) {
  switch (type) {
    case cudaGraphCondTypeIf: return size == 1 || size == 2;
    case cudaGraphCondTypeWhile: return size == 1;
    case cudaGraphCondTypeSwitch: return size > 0;
  }
  return false;
}
bool inside(const Graph* graph, const Graph* outer) {
  for (; graph; graph = graph->parent)
    if (graph == outer) return true;
  return false;
}
} // namespace

std::shared_ptr<Condition> condition_of(cudaGraphConditionalHandle handle) {
  auto it = handles().find(handle);
  return it == handles().end() ? nullptr : it->second.lock();
}

// Guide: "When a conditional node is created, an empty graph is created and the handle is returned to the user".
cudaError_t make_conditional(Graph& graph, cudaConditionalNodeParams& params, Node& node) {
  auto condition = condition_of(params.handle);
  if (!condition || !allowed(params.type, params.size)) return cudaErrorInvalidValue;
  // Guide, "Conditional Handles": "The handle must be associated with a single conditional node."
  if (condition->used) return cudaErrorInvalidValue;
  // API, cudaGraphConditionalHandleCreate: with a node "in this graph or one of its children".
  if (!inside(&graph, condition->graph)) return cudaErrorInvalidValue;
  condition->used = true;
  node.conditional = std::make_shared<Conditional>(Conditional{condition, params.type, {}});
  for (unsigned i = 0; i < params.size; ++i) {
    graph.bodies.push_back(std::make_unique<Graph>());
    graph.bodies.back()->parent = &graph;
    node.conditional->bodies.push_back(reinterpret_cast<cudaGraph_t>(graph.bodies.back().get()));
  }
  params.phGraph_out = node.conditional->bodies.data();
  return cudaSuccess;
}

// What hardware does where the graph of a handle is not executing is not documented. Decided here: a fault.
void set_condition(Condition& condition, unsigned value) {
  if (!condition.executing) throw std::runtime_error(name_of(condition) + " is set outside of a launch of its graph");
  condition.defined = true;
  condition.value = value;
}

namespace {
// Guide, "Conditional Handles": without a default "the condition value is undefined at the start of each graph
// execution". Decided here: a node that is reached with it is a fault.
unsigned value_of(const Condition& condition) {
  if (!condition.defined) throw std::runtime_error(name_of(condition) + " has a node that is reached before it is set");
  return condition.value;
}
} // namespace

// Guide: the value is read "when the dependencies of the conditional node have been met"; that of a WHILE node before
// each iteration. Where nothing is computed (HOSTCUDA_COMPUTE=0) there are no values: the first body runs, once.
void run_conditional(const Conditional& node, const std::function<void(size_t)>& run_body) {
  auto run = [&](size_t body) {
    counters().conditional_bodies++;
    run_body(body);
  };
  const Condition& condition = *node.condition;
  if (!kComputes) return run(0);
  size_t done = 0;
  switch (node.type) {
    case cudaGraphCondTypeIf:
      if (value_of(condition)) return run(0);
      if (node.bodies.size() == 2) run(1); // CUDA 12.8
      return;
    case cudaGraphCondTypeWhile:
      for (; value_of(condition); run(0))
        if (done++ == kLoops) throw std::runtime_error(name_of(condition) + ": a WHILE node does not end");
      return;
    case cudaGraphCondTypeSwitch: // "If the condition >= size, no body graph is executed."
      if (value_of(condition) < node.bodies.size()) run(condition.value);
  }
}

// API, cudaGraphCondAssignDefault: "Apply default handle value when graph is launched." Once for each launch, that of a
// handle of a body, too, however often the body runs.
Execution::Execution(const std::vector<std::shared_ptr<Condition>>& conditions) : conditions_(conditions) {
  for (auto& condition : conditions_) {
    condition->executing = true;
    condition->defined = condition->assigned;
    condition->value = condition->initial;
  }
}
Execution::~Execution() {
  for (auto& condition : conditions_) condition->executing = false;
}

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* out, cudaGraph_t graph, unsigned initial,
                                                 unsigned flags) {
  const char* call = "cudaGraphConditionalHandleCreate";
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  // API: flags "must be cudaGraphCondAssignDefault or 0".
  if (!out || !graph || (flags & ~cudaGraphCondAssignDefault)) return refuse(call, cudaErrorInvalidValue);
  static cudaGraphConditionalHandle next = 1;
  const bool assigned = flags & cudaGraphCondAssignDefault;
  auto condition = std::make_shared<Condition>(Condition{next++, graph_of(graph), initial, assigned});
  handles()[condition->handle] = condition;
  graph_of(graph)->conditions.push_back(condition);
  *out = condition->handle;
  return cudaSuccess;
}
