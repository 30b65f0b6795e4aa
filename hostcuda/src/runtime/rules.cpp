// What captures forbid. Each rule names its source; README.md has them in one table.
// "Guide" is the CUDA C++ Programming Guide, section "CUDA Graphs", "Creating a Graph Using Stream Capture"; "API" is
// the CUDA Runtime API reference.
#include "streams.h"

namespace hostcuda {

std::set<std::shared_ptr<Capture>>& active_captures() {
  static auto* all = new std::set<std::shared_ptr<Capture>>;
  return *all;
}

// Guide, "Invalidation": "When an invalid operation is attempted during stream capture, any associated capture graphs
// are invalidated. When a capture graph is invalidated, further use of any streams which are being captured or
// captured events associated with the graph is invalid and will return an error, until stream capture is ended with
// cudaStreamEndCapture()."
void invalidate(Capture& capture, const std::string& why) {
  if (capture.invalid) return;
  capture.invalid = true;
  TRACE("capture %llu invalidated by %s", capture.id, why.c_str());
}

// A call that may be unsafe while something captures, such as cudaMalloc: API, cudaThreadExchangeStreamCaptureMode.
//   A thread in mode Global: not while it captures (unless that capture is relaxed), nor while another thread
//   captures in mode Global. In mode ThreadLocal: not while it captures itself (unless relaxed). In mode Relaxed:
//   allowed.
// The API names cudaMalloc and event queries; that waits for streams and events count is decided here.
cudaError_t unsafe(const char* call) {
  if (active_captures().empty()) return cudaSuccess;
  const cudaStreamCaptureMode mode = *thread_capture_mode();
  if (mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool prohibited = false;
  for (auto& capture : active_captures()) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool counts = mine ? capture->mode != cudaStreamCaptureModeRelaxed
                             : mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!counts) continue;
    prohibited = true;
    invalidate(*capture, call);
  }
  return prohibited ? refuse(call, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// A wait for the whole device would wait for the streams that capture. Guide, "Prohibited and Unhandled Operations":
// "It is also invalid to query the execution status of or synchronize a broader handle which encompasses an active
// stream capture, such as a device or context handle when any associated stream is in capture mode." That this holds
// in every thread and every mode, and invalidates the captures, is decided here.
cudaError_t device_wide(const char* call) {
  if (active_captures().empty()) return cudaSuccess;
  for (auto& capture : active_captures()) invalidate(*capture, call);
  return refuse(call, cudaErrorStreamCaptureUnsupported);
}

// Guide, same section: "When any stream in the same context is being captured, and it was not created with
// cudaStreamNonBlocking, any attempted use of the legacy stream is invalid." Synchronous calls such as cudaMemcpy use
// it.
cudaError_t implicit(Stream* stream, const char* call) {
  if (active_captures().empty() || stream != legacy_stream()) return cudaSuccess;
  for (auto& capture : active_captures())
    for (Stream* one : capture->streams) {
      if (one->flags & cudaStreamNonBlocking) continue;
      invalidate(*capture, call);
      return refuse(call, cudaErrorStreamCaptureImplicit);
    }
  return cudaSuccess;
}

// Guide, same section: "It is invalid to synchronize or query the execution status of a stream which is being
// captured", and a few asynchronous calls return an error there. cudaStreamAddCallback is one of them (Driver API,
// cuStreamAddCallback: "not supported with cuStreamBeginCapture and cuStreamEndCapture, unlike cuLaunchHostFunc").
cudaError_t unsupported_in_capture(Stream* stream, const char* call, cudaError_t error) {
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (!stream->capture) return cudaSuccess;
  invalidate(*stream->capture, call);
  return refuse(call, error);
}

// Work of a stream that captures: a node after the stream's last ones (Guide, "Cross-stream Dependencies and
// Events").
cudaError_t add_node(Stream* stream, Node node) {
  Capture& capture = *stream->capture;
  if (capture.invalid) return refuse(node.name.c_str(), cudaErrorStreamCaptureInvalidated);
  node.deps = std::move(stream->deps);
  Node* added = append(*capture.graph, std::move(node));
  stream->deps = {added};
  TRACE("capture %llu: node %d %s", capture.id, added->id, added->name.c_str());
  counters().nodes_captured++;
  return cudaSuccess;
}

__attribute__((visibility("default"))) cudaError_t unsafe_call(const char* what) {
  Lock lock(mutex());
  return unsafe(what);
}

} // namespace hostcuda
