#pragma once

#include "work.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace backend {

using at::GraphCaptureMode;
using c10::MempoolId_t;

// For every stream of a capture, how much of its work has been seen. A fork has been joined when the origin has seen
// all of it.
using Clock = std::unordered_map<c10::Stream, uint64_t>;

// A graph while it is recorded. That a stream is being captured belongs to the stream, not to a thread: autograd
// issues its work from threads of its own.
// The body of a node that decides is a capture in another one: streams that fork in it are joined in it.
class Capture : public std::enable_shared_from_this<Capture> {
 public:
  Capture(c10::Stream origin, MempoolId_t pool, GraphCaptureMode mode);
  Capture(c10::Stream origin, std::shared_ptr<Capture> parent, std::shared_ptr<Conditional> node);

  const c10::Stream& origin() const {
    return origin_;
  }
  MempoolId_t pool() const {
    return pool_;
  }
  GraphCaptureMode mode() const {
    return mode_;
  }
  bool begun_by_this_thread() const {
    return thread_ == std::this_thread::get_id();
  }
  // Of a body: what it is a part of, and its node. Null of a whole graph.
  const std::shared_ptr<Capture>& parent() const {
    return parent_;
  }
  const std::shared_ptr<Conditional>& node() const {
    return node_;
  }
  bool is_in(const Capture& other) const;

  void record(const c10::Stream& stream, Work work);
  // Lives until the graph is reset.
  void keep(std::shared_ptr<void> object);
  // What the stream has seen: goes along with an event recorded on it.
  Clock clock(const c10::Stream& stream);
  // The stream waits for an event of this capture, and becomes part of it.
  void join(const c10::Stream& stream, const Clock& seen);

  // Nothing more can come of it, nor of what it is in; the first reason is reported by every later use.
  void invalidate(const std::string& reason);
  std::optional<std::string> failure();
  std::optional<c10::Stream> unjoined_stream();

  std::vector<Work> take_nodes();
  std::vector<std::shared_ptr<void>> take_kept();

 private:
  void check_valid();

  const c10::Stream origin_;
  const MempoolId_t pool_;
  const GraphCaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const std::shared_ptr<Capture> parent_;
  const std::shared_ptr<Conditional> node_;

  std::mutex mutex_; // That of a body is taken before its parent's.
  std::vector<Work> nodes_;
  std::vector<std::shared_ptr<void>> kept_;
  std::unordered_map<c10::Stream, Clock> clocks_;
  std::optional<std::string> failure_;
};

std::shared_ptr<Capture> begin_capture(const c10::Stream& origin, MempoolId_t pool, GraphCaptureMode mode);
// All its streams are ordinary ones again, whether it succeeded or not, and those of its bodies.
void end_capture(const std::shared_ptr<Capture>& capture);
// The stream belongs to a body until that ends, and then to the capture again.
void begin_body_capture(
    const std::shared_ptr<Capture>& capture,
    const c10::Stream& stream,
    std::shared_ptr<Conditional> node);
void end_body_capture(const std::shared_ptr<Capture>& body);

// Invalidates a capture that is about to end, if a stream that was forked in it is left, or a body.
void check_joined(Capture& capture, const std::string& what);
void check_bodies_ended(Capture& capture, const std::string& what);

bool any_capture();
std::shared_ptr<Capture> capture_of(const c10::Stream& stream);

enum class HostWait { kSynchronize, kRead, kPageableCopy };

// Waiting for the stream on the host makes no sense while it is captured, and is unsafe for other captures, depending
// on their modes: then it is refused, and the capture invalidated. The user is told that it was `what`.
void check_host_may_wait(HostWait kind, const std::string& what, const c10::Stream& stream);
// The same of what is on no stream that may be captured, as an event from before: the modes alone decide.
void check_host_may_wait(HostWait kind, const std::string& what);
// What torch refuses before the device is asked, while the stream is captured: the capture goes on.
void check_not_captured(HostWait kind, const std::string& what, const c10::Stream& stream);

// A thread that captures must not do work on the side: it would be missing in the graph.
void check_thread_may_use(const c10::Stream& stream, const std::string& what);

} // namespace backend
