// Events: points in a stream's work, and the forks and joins of captures.
// "Guide" is the CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture".
#include "streams.h"

#include <algorithm>

using namespace hostcuda;

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* event = new Event;
  event->flags = flags;
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Lock lock(mutex());
  delete event_of(handle); // API: allowed before it is complete. Its record stays as long as somebody needs it
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  const char* call = "cudaEventRecord";
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  Event* event = event_of(handle);
  Stream* stream = resolve(stream_handle);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    if (stream->capture->invalid) return refuse(call, cudaErrorStreamCaptureInvalidated);
    // API, cudaEventRecordWithFlags, cudaEventRecordExternal: "Event is captured in the graph as an external event
    // node", which records it with every launch.
    if (flags & cudaEventRecordExternal) {
      auto run = [record = event->record] { record->time = now_ms(); };
      return add_node(stream, {cudaGraphNodeTypeEventRecord, call, run, {}, event->record});
    }
    // A captured event: it stands for nodes, not for work (Guide, "Cross-stream Dependencies and Events").
    event->capture = stream->capture;
    event->deps = stream->deps;
    return cudaSuccess;
  }
  if (auto error = implicit(stream, call)) return error;
  event->capture = nullptr;
  event->deps.clear();
  event->asked = false;
  event->record = std::make_shared<Record>();
  event->record->recorded = true;
  event->record->time = now_ms();
  if (kLazy) {
    // Not the record itself: it holds its queue.
    push(stream, {[weak = std::weak_ptr<Record>(event->record)] {
                    if (auto record = weak.lock()) record->time = now_ms();
                  },
                  {}});
    event->record->position = {stream->queue, stream->queue->issued};
  }
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

namespace {
cudaError_t wait_for_event(cudaEvent_t handle, const char* call, bool query) {
  Position position;
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    Event* event = event_of(handle);
    // Guide, "Prohibited and Unhandled Operations": "It is invalid to synchronize or query the execution status of"
    // a captured event, "because they do not represent items scheduled for execution." In every mode (API,
    // cudaThreadExchangeStreamCaptureMode).
    if (event->capture) {
      if (!event->capture->ended) invalidate(*event->capture, call);
      return refuse(call, cudaErrorCapturedEvent);
    }
    if (auto error = unsafe(call)) return error;
    counters().synchronizations++;
    position = event->record->position;
    if (query && !position.reached() && (event->asked = !event->asked)) return cudaErrorNotReady;
  }
  run_until(position);
  return sticky_error();
}
} // namespace
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return wait_for_event(event, "cudaEventSynchronize", false);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) { return wait_for_event(event, "cudaEventQuery", true); }

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  for (Event* event : {event_of(begin), event_of(end)}) {
    if (event->capture) return refuse("cudaEventElapsedTime", cudaErrorCapturedEvent);
    // API: "If either event has not been recorded", or was created with cudaEventDisableTiming: invalid handle;
    // "if both have been recorded but one or both have not yet been completed": not ready.
    const bool timed = !(event->flags & cudaEventDisableTiming);
    if (!event->record->recorded || !timed) return done(cudaErrorInvalidResourceHandle);
  }
  for (Event* event : {event_of(begin), event_of(end)})
    if (!event->record->position.reached()) return done(cudaErrorNotReady);
  *milliseconds = event_of(end)->record->time - event_of(begin)->record->time;
  return cudaSuccess;
}

namespace {
// An event that was recorded in a stream which captures.
cudaError_t wait_for_captured(Stream* stream, Event* event, const char* call) {
  auto capture = event->capture;
  if (capture->ended) {
    if (stream->capture) invalidate(*stream->capture, call);
    return refuse(call, cudaErrorCapturedEvent);
  }
  if (capture->invalid) return refuse(call, cudaErrorStreamCaptureInvalidated);
  if (!stream->capture) { // a fork: the waiting stream begins to capture (Guide)
    if (stream == legacy_stream()) {
      invalidate(*capture, call);
      return refuse(call, cudaErrorStreamCaptureImplicit);
    }
    stream->capture = capture;
    stream->deps = event->deps;
    capture->streams.insert(stream);
    return cudaSuccess;
  }
  // Guide: "It is invalid to merge two separate capture graphs by waiting on a captured event from a stream which is
  // being captured and is associated with a different capture graph than the event."
  if (stream->capture != capture) {
    invalidate(*stream->capture, call);
    invalidate(*capture, call);
    return refuse(call, cudaErrorStreamCaptureMerge);
  }
  for (Node* node : event->deps) // a join
    if (std::find(stream->deps.begin(), stream->deps.end(), node) == stream->deps.end()) stream->deps.push_back(node);
  return cudaSuccess;
}
} // namespace
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  const char* call = "cudaStreamWaitEvent";
  Lock lock(mutex());
  if (auto error = sticky_error()) return error;
  Event* event = event_of(handle);
  Stream* stream = resolve(stream_handle);
  if (!known(stream)) return refuse(call, cudaErrorInvalidResourceHandle);
  if (stream->capture && stream->capture->invalid) return refuse(call, cudaErrorStreamCaptureInvalidated);
  if (event->capture) return wait_for_captured(stream, event, call);
  if (stream->capture) {
    // API, cudaStreamWaitEvent, cudaEventWaitExternal: an event wait node.
    if (flags & cudaEventWaitExternal)
      return add_node(stream, {cudaGraphNodeTypeWaitEvent, call, nullptr, {}, event->record});
    // API: without a record "the call acts as if the record has already completed".
    if (!event->record->recorded) return cudaSuccess;
    // Guide: "It is invalid to wait on a non-captured event from a stream which is being captured without specifying
    // the cudaEventWaitExternal flag." (cudaErrorStreamCaptureIsolation)
    invalidate(*stream->capture, call);
    return refuse(call, cudaErrorStreamCaptureIsolation);
  }
  if (auto error = implicit(stream, call)) return error;
  wait_before_next(stream, event->record->position);
  return cudaSuccess;
}
