// Streams, events, captures, graphs: the structures, and how work is issued.
#pragma once
#include "state.h"

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace hostcuda {

struct Queue;
// So much of a queue's work.
struct Position {
  std::shared_ptr<Queue> queue;
  unsigned long long upto = 0;
  bool reached() const;
};
struct Item {
  std::function<void()> run; // either work,
  Position after;            // or a wait for another queue
};
// The work of a stream that has not run (HOSTCUDA_LAZY). It outlives its stream.
struct Queue {
  std::deque<Item> items;
  unsigned long long issued = 0, completed = 0;
  bool blocking = false; // ordered with the legacy stream's
};
inline bool Position::reached() const { return !queue || queue->completed >= upto; }

// What a cudaEventRecord made of an event. A new record is a new one, except where a graph's node records it.
struct Record {
  bool recorded = false;
  double time = 0; // in milliseconds, when it ran
  Position position;
};

struct Conditional;
struct Condition;
struct Node {
  cudaGraphNodeType type;
  std::string name;
  std::function<void()> run;
  std::vector<Node*> deps;
  std::shared_ptr<Record> event;            // of an external record or wait
  std::vector<const void*> operands;        // of a copy or a memset
  std::vector<std::shared_ptr<Node>> child; // nodes of a child graph
  std::shared_ptr<Conditional> conditional; // of a conditional node
  int id = 0;
};
struct UserObject {
  void* pointer;
  cudaHostFn_t destroy;
  long long references;
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  std::map<UserObject*, int> objects;
  std::vector<std::shared_ptr<Condition>> conditions; // whose handles were created for it
  std::vector<std::unique_ptr<Graph>> bodies;         // of its conditional nodes
  Graph* parent = nullptr;                            // whose conditional node has it as a body
  std::weak_ptr<void> executable;                     // made of it last
  bool spoiled = false;                               // a capture into it has failed
};

struct Stream;
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread; // that began it
  Graph* graph;
  bool owns; // the graph: not where it is one that was there before
  Stream* origin;
  std::set<Stream*> streams;
  bool invalid = false;
  bool ended = false;
};
struct Stream {
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  bool asked = false;               // a query was answered with "not ready"
  std::shared_ptr<Capture> capture; // in which it takes part
  std::vector<Node*> deps;          // of its next node
};
struct Event {
  unsigned flags = 0;
  bool asked = false;
  std::shared_ptr<Record> record = std::make_shared<Record>();
  std::shared_ptr<Capture> capture; // in which it was recorded last
  std::vector<Node*> deps;
};

// -- streams (streams.cpp); with the mutex held --
Stream* legacy_stream();
Stream* resolve(cudaStream_t handle);
bool known(Stream* stream);
inline Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }
double now_ms();

// -- queues (queues.cpp); never with the mutex held --
void run_until(const Position& position);
void run_stream(const std::shared_ptr<Queue>& queue); // all of it
void run_all();
void run_legacy(); // the legacy stream, and the blocking streams before it
struct Executing { // no other work runs meanwhile
  Executing();
  ~Executing();
};
// With the mutex held:
void add_queue(const std::shared_ptr<Queue>& queue);
void push(Stream* stream, Item item);
void wait_before_next(Stream* stream, const Position& position);

// Work of a stream: a node where it captures, else run now or left for later.
cudaError_t submit(cudaStream_t handle, cudaGraphNodeType type, std::string name, std::function<void()> run,
                   std::vector<const void*> operands = {});

// -- rules of captures (rules.cpp); with the mutex held --
std::set<std::shared_ptr<Capture>>& active_captures();
cudaStreamCaptureMode* thread_capture_mode(); // of this thread (captures.cpp)
void invalidate(Capture& capture, const std::string& why);
cudaError_t unsafe(const char* call);
cudaError_t device_wide(const char* call);
cudaError_t implicit(Stream* stream, const char* call);
cudaError_t unsupported_in_capture(Stream* stream, const char* call, cudaError_t error);
cudaError_t add_node(Stream* stream, Node node);

// -- captures (captures.cpp) --
void leave_captures(Stream* stream); // it is destroyed

// -- graphs (graphs.cpp); with the mutex held --
inline Graph* graph_of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }
inline Node* node_of(cudaGraphNode_t handle) { return reinterpret_cast<Node*>(handle); }
Node* append(Graph& graph, Node node);
bool has_nodes(const Graph& graph, const cudaGraphNode_t* nodes, size_t count); // each of them, and no more than once
std::string violation(const Graph& graph); // why it cannot be instantiated, or "" (graph_rules.cpp)

// User objects that have lost their last reference are destroyed with this, after the mutex is released.
class Releases {
 public:
  void drop(UserObject* object, long long count);
  void drop(const std::map<UserObject*, int>& objects);
  ~Releases();

 private:
  std::vector<UserObject*> unused_;
};
void forget(Graph& graph, Releases& unused); // it is about to be deleted

// -- copies (copies.cpp) --
void register_variable(const void* host, size_t size); // a __device__ variable of a library

} // namespace hostcuda
