// Graphs: nodes, instantiation, launches, and the objects of the user that they hold.
#include "streams.h"

#include <algorithm>

namespace hostcuda {

namespace {
// What a launch needs; a launch that has not run keeps it.
struct Resources {
  std::vector<std::shared_ptr<Node>> nodes; // in the order in which they run
  std::map<UserObject*, int> objects;
  ~Resources() {
    Releases unused;
    Lock lock(mutex());
    unused.drop(objects);
  }
};
struct Exec {
  std::shared_ptr<Resources> resources = std::make_shared<Resources>();
  std::vector<std::shared_ptr<Node>> external; // record or wait for an event of outside
  Position launched;
};
Graph* graph_of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }
Exec* exec_of(cudaGraphExec_t handle) { return reinterpret_cast<Exec*>(handle); }
Node* node_of(cudaGraphNode_t handle) { return reinterpret_cast<Node*>(handle); }

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

void run_nodes(const Resources& resources) {
  for (auto& node : resources.nodes) {
    counters().nodes_run++;
    if (!node->run) continue;
    TRACE("replay node %d %s", node->id, node->name.c_str());
    node->run();
  }
}
} // namespace

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
  std::unique_ptr<Graph> graph(graph_of(handle)); // destroyed last: what its nodes hold goes without the mutex
  Releases unused;
  Lock lock(mutex());
  unused.drop(graph->objects);
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
// Graphs come from captures only.
API cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                 size_t, cudaGraphNodeParams*) {
  return refuse("cudaGraphAddNode", cudaErrorNotSupported);
}
API cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) {
  return refuse("cudaGraphConditionalHandleCreate", cudaErrorNotSupported);
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
  auto* exec = new Exec;
  exec->resources->nodes = ordered(graph->nodes);
  exec->resources->objects = graph->objects;
  for (auto& [object, count] : graph->objects) object->references += count;
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
  TRACE("graph launch of %zu nodes on %p", resources->nodes.size(), static_cast<void*>(stream_handle));
  auto run = [resources] { run_nodes(*resources); };
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    Stream* stream = resolve(stream_handle);
    if (!known(stream)) return refuse("cudaGraphLaunch", cudaErrorInvalidResourceHandle);
    // A node of the graph that is captured, with the nodes of this one in it.
    if (stream->capture) return add_node(stream, cudaGraphNodeTypeGraph, "cudaGraphLaunch", run);
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

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  Lock lock(mutex());
  FILE* file = fopen(path, "w");
  if (!file) return done(cudaErrorUnknown);
  fprintf(file, "digraph hostcuda {\n");
  for (auto& node : graph_of(handle)->nodes) {
    fprintf(file, "  n%d [label=\"%s\"];\n", node->id, node->name.c_str());
    for (Node* before : node->deps) fprintf(file, "  n%d -> n%d;\n", before->id, node->id);
  }
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
