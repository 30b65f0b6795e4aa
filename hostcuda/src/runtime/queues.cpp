// When work runs. Eager order: at once, in the thread that issues it. Lazy order (HOSTCUDA_LAZY): when somebody waits
// for it, and then only it and what it has to come after. Both are orders that CUDA allows (Programming Guide,
// "Asynchronous Concurrent Execution"): a stream's work runs in order, streams run in any order that events and the
// legacy stream leave. In lazy order a wait that is missing gives the old bytes, each time.
#include "streams.h"

#include <dlfcn.h>

#include <algorithm>

namespace hostcuda {

namespace {
std::vector<std::shared_ptr<Queue>>& queues() {
  static auto* all = new std::vector<std::shared_ptr<Queue>>{legacy_stream()->queue};
  return *all;
}
std::recursive_mutex& executor() {
  static auto* one = new std::recursive_mutex;
  return *one;
}
} // namespace

// One thread runs work at a time, so that a stream's order holds between threads. Who waits does so without Python's
// lock, which the running work may need.
Executing::Executing() {
  if (executor().try_lock()) return;
  static auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (check && check()) {
    void* state = save();
    executor().lock();
    restore(state);
  } else {
    executor().lock();
  }
}
Executing::~Executing() { executor().unlock(); }

void add_queue(const std::shared_ptr<Queue>& queue) {
  if (kLazy) queues().push_back(queue);
}

void run_until(const Position& position) {
  if (!kLazy || !position.queue) return;
  Queue& queue = *position.queue;
  {
    Lock lock(mutex());
    if (position.reached()) return;
  }
  Executing executing;
  for (;;) {
    Item item;
    {
      Lock lock(mutex());
      if (position.reached() || queue.items.empty()) return;
      item = std::move(queue.items.front());
      queue.items.pop_front();
    }
    run_until(item.after);
    if (item.run && !sticky) {
      try {
        item.run();
      } catch (const std::exception& error) {
        device_fault(error); // for whoever asks next
      }
    }
    item = {}; // what it holds goes without the mutex
    Lock lock(mutex());
    queue.completed++;
  }
}
void run_stream(const std::shared_ptr<Queue>& queue) { run_until({queue, ~0ull}); }

void run_all() {
  if (!kLazy) return;
  std::vector<std::shared_ptr<Queue>> all;
  {
    Lock lock(mutex());
    all = queues();
  }
  for (auto& queue : all) run_stream(queue);
  all.clear();
  Lock lock(mutex());
  auto unused = [](auto& queue) { return queue.use_count() == 1 && queue->items.empty(); };
  queues().erase(std::remove_if(queues().begin(), queues().end(), unused), queues().end());
}
void run_legacy() {
  if (!kLazy) return;
  std::vector<std::shared_ptr<Queue>> all;
  {
    Lock lock(mutex());
    for (auto& queue : queues())
      if (queue->blocking) all.push_back(queue);
  }
  for (auto& queue : all) run_stream(queue);
  run_stream(legacy_stream()->queue);
}

// The legacy stream waits for all blocking streams, and they wait for it (Runtime API, "Stream synchronization
// behavior": "an implicit stream which synchronizes with all other streams ... except for non-blocking streams").
void push(Stream* stream, Item item) {
  auto& queue = stream->queue;
  auto add = [&](Item one) {
    queue->items.push_back(std::move(one));
    queue->issued++;
  };
  auto wait_for = [&](const std::shared_ptr<Queue>& other) {
    if (other->completed < other->issued) add({nullptr, {other, other->issued}});
  };
  if (stream == legacy_stream()) {
    for (auto& other : queues())
      if (other->blocking) wait_for(other);
  } else if (queue->blocking) {
    wait_for(legacy_stream()->queue);
  }
  add(std::move(item));
}
void wait_before_next(Stream* stream, const Position& position) {
  if (kLazy && position.queue != stream->queue && !position.reached()) push(stream, {nullptr, position});
}

cudaError_t submit(cudaStream_t handle, cudaGraphNodeType type, std::string name, std::function<void()> run,
                   std::vector<const void*> operands) {
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    Stream* stream = resolve(handle);
    if (!known(stream)) return refuse(name.c_str(), cudaErrorInvalidResourceHandle);
    if (stream->capture)
      return add_node(stream, {type, std::move(name), std::move(run), {}, nullptr, std::move(operands)});
    if (auto error = implicit(stream, name.c_str())) return error;
    if (kLazy) {
      TRACE("issue %s on %p", name.c_str(), static_cast<void*>(handle));
      push(stream, {std::move(run), {}});
      return cudaSuccess;
    }
  }
  TRACE("run %s on %p", name.c_str(), static_cast<void*>(handle));
  if (!run) return cudaSuccess;
  Executing executing;
  run();
  return cudaSuccess;
}

__attribute__((visibility("default"))) cudaError_t issue(cudaStream_t stream, std::string name,
                                                         std::function<void()> work) {
  counters().host_ops++;
  if (!kComputes) work = nullptr;
  return submit(stream, cudaGraphNodeTypeKernel, std::move(name), std::move(work));
}

} // namespace hostcuda
