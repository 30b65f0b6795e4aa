// Streams.
#include "streams.h"

#include <chrono>

namespace hostcuda {

namespace {
std::set<Stream*>& streams() {
  static auto* all = new std::set<Stream*>;
  return *all;
}
Stream* create(unsigned flags, int priority) {
  static unsigned long long next_id = 10;
  auto* stream = new Stream;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_id++;
  // Runtime API, "Stream synchronization behavior": blocking unless cudaStreamNonBlocking.
  stream->queue->blocking = !(flags & cudaStreamNonBlocking);
  add_queue(stream->queue);
  streams().insert(stream);
  return stream;
}
} // namespace

Stream* legacy_stream() {
  static auto* one = new Stream;
  return one;
}
// A null stream is the legacy one: torch is compiled without --default-stream per-thread.
Stream* resolve(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return legacy_stream();
  if (handle == cudaStreamPerThread) {
    static thread_local Stream* mine = create(cudaStreamDefault, 0);
    return mine;
  }
  return reinterpret_cast<Stream*>(handle);
}
bool known(Stream* stream) { return stream == legacy_stream() || streams().count(stream); }

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

namespace {
cudaError_t wait_for(cudaStream_t handle, const char* call, bool query) {
  std::shared_ptr<Queue> queue;
  bool legacy;
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    Stream* stream = resolve(handle);
    if (auto error = unsupported_in_capture(stream, call, cudaErrorStreamCaptureUnsupported)) return error;
    if (auto error = unsafe(call)) return error;
    if (auto error = implicit(stream, call)) return error;
    counters().synchronizations++;
    queue = stream->queue;
    legacy = stream == legacy_stream();
    // In lazy order every other query says "not ready": who asks in a loop gets on, who asks once has to cope.
    const bool waiting = kLazy && queue->completed < queue->issued;
    if (query && waiting && (stream->asked = !stream->asked)) return cudaErrorNotReady;
  }
  legacy ? run_legacy() : run_stream(queue);
  return sticky_error();
}
} // namespace

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(mutex());
  *out = reinterpret_cast<cudaStream_t>(create(flags, priority));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
// API, cudaStreamDestroy: with work left, "the function will return immediately and the resources associated with
// stream will be released automatically once the device has completed all work". The queue stays until then.
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock(mutex());
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!streams().count(stream)) return done(cudaErrorInvalidResourceHandle);
  if (stream->capture) leave_captures(stream);
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Lock lock(mutex());
  *priority = resolve(handle)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  Lock lock(mutex());
  *flags = resolve(handle)->flags;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  Lock lock(mutex());
  *id = resolve(handle)->id;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetDevice(cudaStream_t, int* device) {
  *device = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait_for(s, "cudaStreamSynchronize", false); }
API cudaError_t cudaStreamQuery(cudaStream_t s) { return wait_for(s, "cudaStreamQuery", true); }

API cudaError_t cudaDeviceSynchronize() {
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    if (auto error = device_wide("cudaDeviceSynchronize")) return error;
    counters().synchronizations++;
  }
  run_all();
  return sticky_error();
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return guarded([&] {
    return submit(handle, cudaGraphNodeTypeHost, "cudaLaunchHostFunc", [=] { function(data); });
  });
}
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  const char* call = "cudaStreamAddCallback";
  {
    Lock lock(mutex());
    if (auto error = unsupported_in_capture(resolve(handle), call, cudaErrorStreamCaptureUnsupported)) return error;
  }
  return guarded([&] {
    return submit(handle, cudaGraphNodeTypeHost, call, [=] { function(handle, cudaSuccess, data); });
  });
}
