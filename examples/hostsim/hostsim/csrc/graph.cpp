#include "graph.h"

#include "allocator.h"
#include "capture.h"
#include "faults.h"
#include "generator.h"
#include "name.h"
#include "program.h"
#include "rules.h"
#include "streams.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace backend {

namespace {

std::mutex counters_mutex;
GraphCounters counters;

template <typename Change>
void count(Change change) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  change(counters);
}

// Pools in which a capture has failed.
std::mutex spoiled_mutex;
std::set<MempoolId_t> spoiled_pools;

void spoil(const MempoolId_t& pool) {
  std::lock_guard<std::mutex> lock(spoiled_mutex);
  spoiled_pools.insert(pool);
}

void check_not_spoiled(const MempoolId_t& pool) {
  std::lock_guard<std::mutex> lock(spoiled_mutex);
  TORCH_CHECK(
      spoiled_pools.count(pool) == 0 || !in_force(Rule::kFailedCaptureSpoilsItsPool),
      "capture_begin: a capture has failed in this memory pool: take another pool");
}

} // namespace

GraphCounters graph_counters() {
  std::lock_guard<std::mutex> lock(counters_mutex);
  return counters;
}

void reset_graph_counters() {
  count([](GraphCounters& all) {
    GraphCounters fresh;
    fresh.live_graphs = all.live_graphs;
    all = fresh;
  });
}

void count_body(size_t nodes) {
  count([nodes](GraphCounters& all) {
    ++all.bodies_run;
    all.nodes_replayed += static_cast<int64_t>(nodes);
  });
}

// What torch.accelerator.Graph is on this device.
class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs& arguments) : keep_graph_(arguments.keep_graph) {}
  ~Graph() override;

  void capture_begin(MempoolId_t pool, GraphCaptureMode mode) override;
  void capture_end() override;
  void instantiate() override;
  void replay() override;
  void reset() override;
  MempoolId_t pool() const override;
  void enable_debug_mode() override;
  void debug_dump(const std::string& path) override;

 private:
  void check_may_begin(const c10::Stream& stream) const;
  // The memory of the graph is not used by anything that still runs, and goes back.
  void release_memory();

  const bool keep_graph_;
  bool debug_ = false;
  bool instantiated_ = false;
  c10::DeviceIndex device_ = 0;
  std::optional<MempoolId_t> pool_;
  std::shared_ptr<Capture> capture_; // While it is captured,
  std::shared_ptr<Program> program_; // and afterwards.
};

Graph::~Graph() {
  reset();
}

void Graph::check_may_begin(const c10::Stream& stream) const {
  TORCH_CHECK(!capture_, "capture_begin: this graph is being captured already; call capture_end first");
  TORCH_CHECK(
      !program_ || planted(Fault::kRecaptureWithoutResetAllowed),
      "capture_begin: this graph has been captured already; call reset before capturing it again");
  TORCH_CHECK(
      !is_default_stream(stream) || planted(Fault::kCaptureOnDefaultStreamAllowed),
      "capture_begin: ",
      stream_name(stream),
      " cannot be captured; make another stream current first (with torch.Stream(): ...)");
}

void Graph::capture_begin(MempoolId_t pool, GraphCaptureMode mode) {
  const c10::DeviceIndex device = current_device();
  const c10::Stream stream = current_stream(device);
  check_may_begin(stream);
  if (program_) {
    reset();
  }
  const bool shared = pool != MempoolId_t{0, 0} && !planted(Fault::kPoolNotShared);
  const MempoolId_t own_pool = shared ? pool : pool_for_graph();
  retain_pool(own_pool);
  try {
    check_not_spoiled(own_pool);
    capture_ = begin_capture(stream, own_pool, mode);
  } catch (...) {
    end_allocate_to_pool(own_pool);
    backend::release_pool(own_pool);
    throw;
  }
  device_ = device;
  pool_ = own_pool;
}

void Graph::capture_end() {
  TORCH_CHECK(capture_, "capture_end: nothing is being captured; call capture_begin first");
  const std::shared_ptr<Capture> capture = std::exchange(capture_, nullptr);
  if (current_stream(device_) != capture->origin()) {
    capture->invalidate(
        "capture_end was called on " + stream_name(current_stream(device_)) + ", but the capture has begun on " +
        stream_name(capture->origin()) + "; make that stream current again before");
  }
  if (!capture->begun_by_this_thread() && capture->mode() != GraphCaptureMode::Relaxed) {
    capture->invalidate(
        "capture_end was called by another thread than capture_begin; only the mode \"relaxed\" allows that");
  }
  check_bodies_ended(*capture, "capture_end");
  check_joined(*capture, "capture_end");
  end_capture(capture);
  backend::capture_ended();

  if (const auto failure = capture->failure()) {
    capture->take_nodes();
    spoil(*pool_);
    if (in_force(Rule::kFailedCaptureHoldsGenerators)) {
      hold_generators(true);
    }
    if (in_force(Rule::kFailedCaptureHoldsItsPool)) {
      pool_.reset();
    } else {
      end_allocate_to_pool(*pool_);
      release_memory();
    }
    TORCH_CHECK(false, "the capture has failed and the graph is empty: ", *failure);
  }
  end_allocate_to_pool(*pool_);
  hold_generators(false);
  program_ = std::make_shared<Program>(capture->take_nodes(), capture->take_kept(), *pool_);
  count([this](GraphCounters& all) {
    ++all.captures;
    ++all.live_graphs;
    all.nodes_captured += static_cast<int64_t>(program_->size_with_bodies());
  });
  if (!keep_graph_) {
    instantiate();
  }
}

void Graph::instantiate() {
  TORCH_CHECK(!capture_, "instantiate: the graph is still being captured; call capture_end first");
  TORCH_CHECK(program_, "instantiate: the graph is empty; capture something first");
  // There is nothing to prepare: nodes run as they were recorded.
  instantiated_ = true;
}

void Graph::replay() {
  TORCH_CHECK(!capture_, "replay: the graph is still being captured; call capture_end first");
  TORCH_CHECK(
      program_, "replay: the graph is empty, because it was never captured, was reset, or its capture failed");
  if (!instantiated_) {
    instantiate();
  }
  const c10::Stream current = current_stream(device_);
  if (const auto capture = capture_of(current)) {
    const std::string reason = "replaying a graph while " + stream_name(current) +
        " is being captured is not possible: a graph cannot be part of another one";
    capture->invalidate(reason);
    TORCH_CHECK(false, reason);
  }
  program_->check_memory();
  const c10::Stream stream = planted(Fault::kReplayOnDefaultStream) ? default_stream(device_) : current;
  // The queue shares the nodes, so that the graph may be reset while it still has to run.
  issue(stream, {"replay of a graph", [program = program_] { program->run(); }});
  count([this](GraphCounters& all) {
    ++all.replays;
    all.nodes_replayed += static_cast<int64_t>(program_->size());
  });
}

void Graph::release_memory() {
  if (pool_) {
    drain_device(device_);
    release_pool(*pool_);
    pool_.reset();
  }
}

void Graph::reset() {
  if (capture_) {
    end_capture(capture_);
    backend::capture_ended();
    end_allocate_to_pool(*pool_);
    capture_.reset();
  }
  if (program_) {
    count([](GraphCounters& all) { --all.live_graphs; });
  }
  release_memory();
  program_.reset();
  instantiated_ = false;
}

MempoolId_t Graph::pool() const {
  TORCH_CHECK(pool_, "pool: the graph has no memory before capture_begin and after reset");
  return *pool_;
}

void Graph::enable_debug_mode() {
  debug_ = true;
}

void Graph::debug_dump(const std::string& path) {
  if (!debug_) {
    TORCH_WARN("debug_dump writes nothing unless enable_debug_mode was called before");
    return;
  }
  TORCH_CHECK(program_, "debug_dump: the graph is empty; capture something first");
  std::ofstream file(path);
  program_->print(file);
  TORCH_CHECK(file.good(), "debug_dump: cannot write ", path);
}

} // namespace backend

namespace at {

using HostGraph = backend::Graph;

REGISTER_GRAPH_IMPL(DEVICE_REGISTRY_KEY, HostGraph)

} // namespace at
