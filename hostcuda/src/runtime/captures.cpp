// Begin and end of captures, and what they say of themselves.
// "Guide" is the CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture"; "API" the Runtime
// API reference.
#include "streams.h"

using namespace hostcuda;

cudaStreamCaptureMode* hostcuda::thread_capture_mode() {
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return &mode;
}

namespace {
void end(const std::shared_ptr<Capture>& capture) {
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->deps.clear();
  }
  capture->ended = true;
  active_captures().erase(capture);
}
bool reaches(const std::vector<Node*>& from, const std::vector<Node*>& wanted) {
  std::set<Node*> seen;
  std::vector<Node*> todo(from);
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    if (!seen.insert(node).second) continue;
    todo.insert(todo.end(), node->deps.begin(), node->deps.end());
  }
  for (Node* node : wanted)
    if (!seen.count(node)) return false;
  return true;
}
// Guide, "Cross-stream Dependencies and Events": "Any other streams which are being captured to the same capture
// graph, due to event-based dependencies, must also be joined back to the origin stream." Else the capture fails.
cudaError_t result_of(const Capture& capture) {
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  for (Stream* stream : capture.streams)
    if (!reaches(capture.origin->deps, stream->deps)) return cudaErrorStreamCaptureUnjoined;
  return cudaSuccess;
}

// What a capture that has failed leaves. A graph that was there before is its owner's; what the documentation does not
// say, and is decided here: it keeps the nodes that it has got, and cannot be instantiated any more.
// Any other is returned, to be deleted.
std::unique_ptr<Graph> discard(const Capture& capture, Releases& unused) {
  if (!capture.owns) {
    capture.graph->spoiled = true;
    return nullptr;
  }
  forget(*capture.graph, unused);
  return std::unique_ptr<Graph>(capture.graph);
}
} // namespace

// The documentation does not say what becomes of the capture. Decided here: it is invalid, and it ends if nobody can
// end it any more.
void hostcuda::leave_captures(Stream* stream) {
  auto capture = stream->capture;
  invalidate(*capture, "cudaStreamDestroy");
  if (capture->origin == stream) {
    end(capture);
    counters().captures_failed++;
    Releases unused;
    discard(*capture, unused);
  } else {
    capture->streams.erase(stream);
  }
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, *thread_capture_mode());
  return cudaSuccess;
}

namespace {
// Into a graph that is there, or (null) one that is made.
cudaError_t begin(cudaStream_t handle, Graph* graph, const cudaGraphNode_t* deps, size_t count,
                  cudaStreamCaptureMode mode, const char* call) {
  Stream* stream = resolve(handle);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  // Guide: "Stream capture can be used on any CUDA stream except cudaStreamLegacy (the NULL stream)."
  if (stream == legacy_stream()) return refuse(call, cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return refuse(call, cudaErrorIllegalState);
  static unsigned long long next_id = 1;
  auto capture = std::make_shared<Capture>();
  capture->id = next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = graph ? graph : new Graph;
  capture->owns = !graph;
  capture->origin = stream;
  capture->streams = {stream};
  stream->capture = capture;
  stream->deps.clear();
  for (size_t i = 0; i < count; ++i) stream->deps.push_back(node_of(deps[i]));
  active_captures().insert(capture);
  counters().captures++;
  TRACE("capture %llu begins on %p, mode %d", capture->id, static_cast<void*>(handle), mode);
  return cudaSuccess;
}
} // namespace
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  return begin(stream, nullptr, nullptr, 0, mode, "cudaStreamBeginCapture");
}
// API: operations "will instead be captured into graph, which will be returned via cudaStreamEndCapture". It stays its
// owner's. The capture has an id of its own.
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t* deps,
                                              const cudaGraphEdgeData*, size_t count, cudaStreamCaptureMode mode) {
  const char* call = "cudaStreamBeginCaptureToGraph";
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  if (!graph || !has_nodes(*graph_of(graph), deps, count)) return refuse(call, cudaErrorInvalidValue);
  return begin(stream, graph_of(graph), deps, count, mode, call);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  const char* call = "cudaStreamEndCapture";
  std::unique_ptr<Graph> lost; // what its nodes hold goes without the mutex
  Releases unused;
  Lock lock(mutex());
  if (out) *out = nullptr;
  Stream* stream = resolve(handle);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (!stream->capture) return refuse(call, cudaErrorIllegalState);
  auto capture = stream->capture;
  // Guide: with other streams in the capture, "cudaStreamEndCapture() must be called in the same stream where
  // cudaStreamBeginCapture() was called; this is the origin stream".
  if (capture->origin != stream) {
    invalidate(*capture, call);
    return refuse(call, cudaErrorStreamCaptureUnmatched);
  }
  // API, cudaStreamEndCapture: "If the mode argument to cudaStreamBeginCapture was not cudaStreamCaptureModeRelaxed,
  // this call must be from the same thread as cudaStreamBeginCapture."
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return refuse(call, cudaErrorStreamCaptureWrongThread);
  // A graph that was there before needs no place for its handle. (Decided here; torch gives none.)
  if (!out && capture->owns) return refuse(call, cudaErrorInvalidValue);
  const cudaError_t error = result_of(*capture);
  end(capture);
  TRACE("capture %llu ends: %s, %zu nodes", capture->id, cudaGetErrorName(error), capture->graph->nodes.size());
  // Guide, "Invalidation": "This call will take the associated streams out of capture mode, but will also return an
  // error value and a NULL graph."
  if (error) {
    counters().captures_failed++;
    lost = discard(*capture, unused);
    return refuse(call, error);
  }
  if (out) *out = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}

// API, cudaStreamIsCapturing: "if this is called on cudaStreamLegacy (the "null stream") while a blocking stream on
// the same device is capturing, it will return cudaErrorStreamCaptureImplicit ... The blocking stream capture is not
// invalidated."
API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Lock lock(mutex());
  Stream* stream = resolve(handle);
  if (!known(stream)) return refuse("cudaStreamIsCapturing", cudaErrorInvalidResourceHandle);
  *status = cudaStreamCaptureStatusNone;
  if (stream == legacy_stream()) {
    for (auto& capture : active_captures())
      for (Stream* one : capture->streams)
        if (!(one->flags & cudaStreamNonBlocking))
          return refuse("cudaStreamIsCapturing", cudaErrorStreamCaptureImplicit);
  } else if (stream->capture) {
    *status = stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** deps,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(mutex());
  if (auto error = cudaStreamIsCapturing(handle, status)) return error;
  Stream* stream = resolve(handle);
  if (id && stream->capture) *id = stream->capture->id;
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph);
  if (deps) *deps = reinterpret_cast<const cudaGraphNode_t*>(stream->deps.data());
  if (edges) *edges = nullptr;
  if (count) *count = stream->deps.size();
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* deps,
                                                    const cudaGraphEdgeData*, size_t count, unsigned flags) {
  const char* call = "cudaStreamUpdateCaptureDependencies";
  Lock lock(mutex());
  Stream* stream = resolve(handle);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (!stream->capture) return refuse(call, cudaErrorIllegalState);
  if (flags == cudaStreamSetCaptureDependencies) stream->deps.clear();
  for (size_t i = 0; i < count; ++i) stream->deps.push_back(reinterpret_cast<Node*>(deps[i]));
  return cudaSuccess;
}
