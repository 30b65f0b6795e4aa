// Graphs: nodes, instantiation, launches, and the objects of the user that they hold.
#include "conditionals.h"

#include <algorithm>

namespace hostcuda {

namespace {
struct Step {
  std::shared_ptr<Node> node;
  std::vector<std::vector<Step>> bodies; // of a conditional node
};
using Steps = std::vector<Step>; // in the order in which they run

// What a launch needs; a launch that has not run keeps it. That of bodies is in it.
struct Resources {
  Steps steps;
  std::vector<std::shared_ptr<Condition>> conditions;
  std::map<UserObject*, int> objects;
  ~Resources() {
    Releases unused;
    Lock lock(mutex());
    unused.drop(objects);
  }
};
struct Exec {
  std::shared_ptr<Resources> resources;
  std::shared_ptr<void> alive = std::make_shared<char>();
  std::vector<std::shared_ptr<Node>> external; // record or wait for an event of outside
  Position launched;
};
Exec* exec_of(cudaGraphExec_t handle) { return reinterpret_cast<Exec*>(handle); }

// An order that the dependencies allow: that of the capture, or (HOSTCUDA_ORDER=lifo) always the latest node that is
// ready. CUDA promises no more than the dependencies (Programming Guide, "Graph Structure").
std::vector<std::shared_ptr<Node>> ordered(const std::vector<std::shared_ptr<Node>>& nodes) {
  if (!kLifo) return nodes;
  std::set<Node*> here, ran;
  for (auto& node : nodes) here.insert(node.get());
  auto ready = [&](const std::shared_ptr<Node>& node) {
    return std::all_of(node->deps.begin(), node->deps.end(), [&](Node* d) { return !here.count(d) || ran.count(d); });
  };
  std::vector<std::shared_ptr<Node>> result, left(nodes);
  while (!left.empty()) {
    auto latest = std::find_if(left.rbegin(), left.rend(), ready);
    if (latest == left.rend()) {
      fprintf(stderr, "hostcuda: a graph has a cycle\n");
      abort();
    }
    ran.insert(latest->get());
    result.push_back(*latest);
    left.erase(std::next(latest).base());
  }
  return result;
}

// The nodes of a graph and of its bodies as they are now, and what they hold.
Steps take(const Graph& graph, Resources& resources) {
  Steps steps;
  for (auto& node : ordered(graph.nodes)) {
    steps.push_back({node, {}});
    if (!node->conditional) continue;
    for (cudaGraph_t body : node->conditional->bodies) steps.back().bodies.push_back(take(*graph_of(body), resources));
  }
  resources.conditions.insert(resources.conditions.end(), graph.conditions.begin(), graph.conditions.end());
  for (auto& [object, count] : graph.objects) {
    resources.objects[object] += count;
    object->references += count;
  }
  return steps;
}
std::shared_ptr<Resources> snapshot(const Graph& graph) {
  auto resources = std::make_shared<Resources>();
  resources->steps = take(graph, *resources);
  return resources;
}

void run_steps(const Steps& steps) {
  for (auto& [node, bodies] : steps) {
    counters().nodes_run++;
    if (!node->run && !node->conditional) continue;
    TRACE("replay node %d %s", node->id, node->name.c_str());
    if (node->conditional)
      run_conditional(*node->conditional, [&bodies = bodies](size_t body) { run_steps(bodies[body]); });
    else
      node->run();
  }
}
void run_all_steps(const Resources& resources) {
  Execution execution(resources.conditions);
  run_steps(resources.steps);
}

// A node that runs a graph as it is now. API, cudaGraphNodeTypeConditional: a graph which contains conditional nodes
// "cannot be used in a child node".
bool make_child(const std::shared_ptr<Resources>& resources, Node& node) {
  for (auto& step : resources->steps) {
    if (step.node->conditional) return false;
    node.child.push_back(step.node);
  }
  node.run = [resources] { run_all_steps(*resources); };
  return true;
}
} // namespace

Node* append(Graph& graph, Node node) {
  static int next = 0;
  node.id = next++;
  graph.nodes.push_back(std::make_shared<Node>(std::move(node)));
  return graph.nodes.back().get();
}
bool has_nodes(const Graph& graph, const cudaGraphNode_t* nodes, size_t count) {
  std::set<Node*> here, seen;
  for (auto& node : graph.nodes) here.insert(node.get());
  for (size_t i = 0; i < count; ++i)
    if (!here.count(node_of(nodes[i])) || !seen.insert(node_of(nodes[i])).second) return false;
  return true;
}
void forget(Graph& graph, Releases& unused) {
  unused.drop(graph.objects);
  for (auto& condition : graph.conditions) condition->graph = nullptr;
  for (auto& body : graph.bodies) forget(*body, unused);
}

void Releases::drop(UserObject* object, long long count) {
  object->references -= count;
  if (object->references <= 0) unused_.push_back(object);
}
void Releases::drop(const std::map<UserObject*, int>& objects) {
  for (auto& [object, count] : objects) drop(object, count);
}
Releases::~Releases() {
  for (UserObject* object : unused_) {
    if (object->destroy) object->destroy(object->pointer);
    delete object;
  }
}

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaGraphCreate(cudaGraph_t* out, unsigned) {
  *out = reinterpret_cast<cudaGraph_t>(new Graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  const char* call = "cudaGraphDestroy";
  std::unique_ptr<Graph> graph; // destroyed last: what its nodes hold goes without the mutex
  Releases unused;
  Lock lock(mutex());
  if (graph_of(handle)->parent) return refuse(call, cudaErrorInvalidValue); // it is its node's
  // API, cudaStreamGetCaptureInfo: "All operations other than destroy and node removal are permitted on the graph
  // while the capture sequence is in progress."
  for (auto& capture : active_captures())
    for (Graph* one = capture->graph; one; one = one->parent)
      if (one == graph_of(handle)) return refuse(call, cudaErrorIllegalState);
  graph.reset(graph_of(handle));
  forget(*graph, unused);
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  Lock lock(mutex());
  auto& all = graph_of(handle)->nodes;
  if (!nodes) {
    *count = all.size();
    return cudaSuccess;
  }
  const size_t room = *count;
  for (size_t i = 0; i < room; ++i)
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(i < all.size() ? all[i].get() : nullptr);
  *count = std::min(room, all.size()); // API: entries above the number of nodes are NULL, and it is returned
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node_of(node)->type;
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* deps, cudaGraphEdgeData*,
                                             size_t* count) {
  Lock lock(mutex());
  auto& all = node_of(node)->deps;
  if (deps)
    for (size_t i = 0; i < std::min(*count, all.size()); ++i) deps[i] = reinterpret_cast<cudaGraphNode_t>(all[i]);
  *count = all.size();
  return cudaSuccess;
}
// Work comes from captures only.
API cudaError_t cudaGraphAddNode(cudaGraphNode_t* out, cudaGraph_t handle, const cudaGraphNode_t* deps,
                                 const cudaGraphEdgeData*, size_t count, cudaGraphNodeParams* params) {
  const char* call = "cudaGraphAddNode";
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  if (!out || !handle || !params) return refuse(call, cudaErrorInvalidValue);
  Graph& graph = *graph_of(handle);
  // API: dependencies are the graph's nodes, and "may not have any duplicate entries".
  if (!has_nodes(graph, deps, count)) return refuse(call, cudaErrorInvalidValue);
  Node node{params->type, "", nullptr, {}};
  for (size_t i = 0; i < count; ++i) node.deps.push_back(node_of(deps[i]));
  switch (params->type) {
    case cudaGraphNodeTypeConditional:
      node.name = "conditional node";
      if (auto error = make_conditional(graph, params->conditional, node)) return refuse(call, error);
      break;
    case cudaGraphNodeTypeGraph: // API: "The child graph is cloned in this call."
      node.name = "child graph";
      if (!params->graph.graph || params->graph.ownership != cudaGraphChildGraphOwnershipClone ||
          !make_child(snapshot(*graph_of(params->graph.graph)), node))
        return refuse(call, cudaErrorInvalidValue);
      break;
    case cudaGraphNodeTypeEmpty: node.name = "empty node"; break;
    default: return refuse(call, cudaErrorNotSupported);
  }
  *out = reinterpret_cast<cudaGraphNode_t>(append(graph, std::move(node)));
  return cudaSuccess;
}
API cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t, cudaKernelNodeParams* params) {
  *params = {};
  return cudaSuccess;
}

// The executable graph is a snapshot: the graph may be changed or destroyed afterwards (Programming Guide, "Graph
// Instantiation"), and it has its own references to user objects (Programming Guide, "CUDA User Objects").
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long) {
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  Graph* graph = graph_of(handle);
  if (auto why = violation(*graph); !why.empty())
    return refuse(("cudaGraphInstantiate (" + why + ")").c_str(), cudaErrorInvalidValue);
  auto* exec = new Exec;
  exec->resources = snapshot(*graph);
  graph->executable = exec->alive;
  for (auto& node : graph->nodes)
    if (node->event) exec->external.push_back(node);
  counters().instantiations++;
  *out = reinterpret_cast<cudaGraphExec_t>(exec);
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}
// Launches that have not run keep what they need (API, cudaGraphExecDestroy).
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  delete exec_of(handle);
  return cudaSuccess;
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  auto& resources = exec_of(handle)->resources;
  TRACE("graph launch of %zu nodes on %p", resources->steps.size(), static_cast<void*>(stream_handle));
  auto run = [resources] { run_all_steps(*resources); };
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    Stream* stream = resolve(stream_handle);
    if (!known(stream)) return refuse("cudaGraphLaunch", cudaErrorInvalidResourceHandle);
    // A node of the graph that is captured, with the nodes of this one in it.
    if (stream->capture) {
      Node node{cudaGraphNodeTypeGraph, "cudaGraphLaunch", nullptr, {}};
      if (make_child(resources, node)) return add_node(stream, std::move(node));
      return unsupported_in_capture(stream, "cudaGraphLaunch", cudaErrorStreamCaptureUnsupported);
    }
    if (auto error = implicit(stream, "cudaGraphLaunch")) return error;
    counters().graph_launches++;
    Exec* exec = exec_of(handle);
    if (kLazy) {
      // API, cudaGraphLaunch: "Each launch is ordered behind both any previous work in stream and any previous
      // launches of graphExec."
      wait_before_next(stream, exec->launched);
      for (auto& node : exec->external) // before the whole graph, not only before the node
        if (node->type == cudaGraphNodeTypeWaitEvent) wait_before_next(stream, node->event->position);
      push(stream, {run, {}});
      exec->launched = {stream->queue, stream->queue->issued};
    }
    for (auto& node : exec->external) {
      if (node->type != cudaGraphNodeTypeEventRecord) continue;
      node->event->recorded = true;
      node->event->position = exec->launched;
    }
    if (kLazy) return cudaSuccess;
  }
  return guarded([&] {
    Executing executing;
    run();
    return cudaSuccess;
  });
}

namespace {
void print(FILE* file, const Graph& graph) {
  for (auto& node : graph.nodes) {
    fprintf(file, "  n%d [label=\"%s\"];\n", node->id, node->name.c_str());
    for (Node* before : node->deps) fprintf(file, "  n%d -> n%d;\n", before->id, node->id);
    if (!node->conditional) continue;
    for (size_t i = 0; i < node->conditional->bodies.size(); ++i) {
      fprintf(file, "  subgraph cluster_%d_%zu {\n  label=\"body %zu of n%d\";\n", node->id, i, i, node->id);
      print(file, *graph_of(node->conditional->bodies[i]));
      fprintf(file, "  }\n");
    }
  }
}
} // namespace
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  Lock lock(mutex());
  FILE* file = fopen(path, "w");
  if (!file) return done(cudaErrorUnknown);
  fprintf(file, "digraph hostcuda {\n");
  print(file, *graph_of(handle));
  fprintf(file, "}\n");
  fclose(file);
  return cudaSuccess;
}

// -- user objects (Programming Guide, "CUDA User Objects") --

API cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* pointer, cudaHostFn_t destroy, unsigned count,
                                     unsigned) {
  *out = reinterpret_cast<cudaUserObject_t>(new UserObject{pointer, destroy, count});
  return cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  Releases unused;
  Lock lock(mutex());
  unused.drop(reinterpret_cast<UserObject*>(object), count);
  return cudaSuccess;
}
API cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned count) {
  Lock lock(mutex());
  reinterpret_cast<UserObject*>(object)->references += count;
  return cudaSuccess;
}
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count,
                                          unsigned flags) {
  Lock lock(mutex());
  auto* object = reinterpret_cast<UserObject*>(handle);
  graph_of(graph)->objects[object] += count;
  // cudaGraphUserObjectMove: the caller's references, else new ones
  if (!(flags & cudaGraphUserObjectMove)) object->references += count;
  return cudaSuccess;
}
