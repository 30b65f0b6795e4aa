// What a graph has to be like to be instantiated. README.md has the rules in its table.
// "Guide" is the CUDA Programming Guide, "CUDA Graphs", "Conditional Graph Nodes"; "API" the Runtime API reference.
#include "conditionals.h"
#include "memory.h"

#include <algorithm>

namespace hostcuda {

namespace {
// Guide, "Conditional Node Body Graph Requirements": "The graph can only contain kernel nodes, empty nodes, memcpy
// nodes, memset nodes, child graph nodes, and conditional nodes."
bool in_bodies(cudaGraphNodeType type) {
  switch (type) {
    case cudaGraphNodeTypeKernel:
    case cudaGraphNodeTypeEmpty:
    case cudaGraphNodeTypeMemcpy:
    case cudaGraphNodeTypeMemset:
    case cudaGraphNodeTypeGraph:
    case cudaGraphNodeTypeConditional: return true;
    default: return false;
  }
}

// Same section: "Only copies/memsets involving device memory and/or pinned device-mapped host memory are permitted",
// and "Both operands must be accessible from the current device at time of instantiation".
bool accessible(const void* pointer) { return block_of(reinterpret_cast<uintptr_t>(pointer)) != blocks().end(); }

// Nodes of a body, and (API, cudaConditionalNodeParams: "This applies recursively to child graphs and conditional
// bodies") those of the graphs in it; bodies in bodies have their own turn.
std::string of_body(const std::vector<std::shared_ptr<Node>>& nodes) {
  for (auto& node : nodes) {
    if (!in_bodies(node->type)) return node->name + " in the body of a conditional node";
    if (!std::all_of(node->operands.begin(), node->operands.end(), accessible))
      return node->name + " of other memory than the device's in the body of a conditional node";
    if (auto found = of_body(node->child); !found.empty()) return found;
  }
  return "";
}

std::string of_graph(const Graph& graph) {
  // Decided here: what the nodes are that it has got is left to chance.
  if (graph.spoiled) return "a capture into the graph has failed";
  // API, cudaGraphConditionalHandleCreate: "Handles not associated with a conditional node may cause graph
  // instantiation to fail." They do here.
  for (auto& condition : graph.conditions)
    if (!condition->used) return "a conditional handle without a node";
  for (auto& body : graph.bodies) {
    if (auto found = of_body(body->nodes); !found.empty()) return found;
    if (auto found = of_graph(*body); !found.empty()) return found;
  }
  return "";
}
} // namespace

std::string violation(const Graph& graph) {
  // The bodies are their node's (API, cudaConditionalNodeParams, phGraph_out). Decided here, as for child graphs that
  // were moved: they "cannot be independently instantiated or destroyed".
  if (graph.parent) return "the body of a conditional node by itself";
  // API, cudaGraphNodeTypeConditional: "Only one instantiation of the graph may exist at any point in time."
  if (!graph.bodies.empty() && !graph.executable.expired()) return "a second time, with conditional nodes";
  return of_graph(graph);
}

} // namespace hostcuda
