#include "capture.h"

#include "conditional.h"
#include "faults.h"
#include "name.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace backend {

namespace {

// Guards which streams are captured, and by what. Taken before the mutex of a capture.
std::mutex registry_mutex;
std::unordered_map<c10::Stream, std::shared_ptr<Capture>> captured_streams;
std::vector<std::shared_ptr<Capture>> captures;
// Lets everything that happens without a capture pass with one load.
std::atomic<size_t> capture_count{0};

// With the registry's mutex held.
void release_streams(const Capture& capture) {
  for (auto it = captured_streams.begin(); it != captured_streams.end();) {
    it = it->second->is_in(capture) ? captured_streams.erase(it) : std::next(it);
  }
}

Fault fault_that_allows(HostWait kind) {
  switch (kind) {
    case HostWait::kRead:
      return Fault::kCaptureAllowsItem;
    case HostWait::kPageableCopy:
      return Fault::kCaptureAllowsPageableCopy;
    default:
      return Fault::kCaptureAllowsSynchronize;
  }
}

const char* advice(HostWait kind) {
  switch (kind) {
    case HostWait::kRead:
      return "The work is recorded, not run, so that there is no value yet: read it after a replay, or keep it in a "
             "tensor.";
    case HostWait::kPageableCopy:
      return "Copy from and to pinned memory with non_blocking=True, or move the copy out of the capture.";
    default:
      return "The work is recorded, not run, so that there is nothing to wait for: synchronise before the capture or "
             "after a replay, and order streams by events.";
  }
}

// Of two reasons why a capture forbids a wait, the one that concerns the stream itself.
std::shared_ptr<Capture> capture_that_forbids(const std::optional<c10::Stream>& stream) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  if (stream && captured_streams.count(*stream)) {
    return captured_streams.at(*stream);
  }
  for (const auto& capture : captures) {
    const GraphCaptureMode mode = capture->mode();
    const bool everywhere = mode == GraphCaptureMode::Global || mode == GraphCaptureMode::Default;
    const bool here = mode == GraphCaptureMode::ThreadLocal && capture->begun_by_this_thread();
    if (everywhere || here) {
      return capture;
    }
  }
  return nullptr;
}

std::string refusal(HostWait kind, const std::string& what, const std::shared_ptr<Capture>& capture) {
  return what + " is not possible while a graph is captured on " + stream_name(capture->origin()) + ". " + advice(kind);
}

void check_wait(HostWait kind, const std::string& what, const std::optional<c10::Stream>& stream) {
  if (!any_capture() || planted(fault_that_allows(kind))) {
    return;
  }
  if (const auto capture = capture_that_forbids(stream)) {
    const std::string reason = refusal(kind, what, capture);
    capture->invalidate(reason);
    TORCH_CHECK(false, reason);
  }
}

} // namespace

Capture::Capture(c10::Stream origin, MempoolId_t pool, GraphCaptureMode mode)
    : origin_(origin), pool_(std::move(pool)), mode_(mode) {
  clocks_[origin_] = {};
}

Capture::Capture(c10::Stream origin, std::shared_ptr<Capture> parent, std::shared_ptr<Conditional> node)
    : origin_(origin),
      pool_(parent->pool()),
      mode_(parent->mode()),
      parent_(std::move(parent)),
      node_(std::move(node)) {
  clocks_[origin_] = {};
}

bool Capture::is_in(const Capture& other) const {
  return this == &other || (parent_ && parent_->is_in(other));
}

void Capture::check_valid() {
  const auto reason = failure_ || !parent_ ? failure_ : parent_->failure();
  TORCH_CHECK(!reason, "this capture was invalidated before: ", *reason);
}

void Capture::record(const c10::Stream& stream, Work work) {
  if (node_ && work.generator) {
    const std::string reason = "'" + work.name + "' draws random numbers in the body of a branch or a loop: a graph " +
        "advances its generator by as much at each replay, whatever has run. Draw them before it.";
    invalidate(reason);
    TORCH_CHECK(false, reason);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  check_valid();
  ++clocks_[stream][stream];
  nodes_.push_back(std::move(work));
}

void Capture::keep(std::shared_ptr<void> object) {
  if (parent_) {
    parent_->keep(std::move(object));
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(object));
}

Clock Capture::clock(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return clocks_[stream];
}

void Capture::join(const c10::Stream& stream, const Clock& seen) {
  std::lock_guard<std::mutex> registry_lock(registry_mutex);
  std::lock_guard<std::mutex> lock(mutex_);
  check_valid();
  const bool forked = captured_streams.count(stream) == 0;
  if (forked) {
    captured_streams[stream] = shared_from_this();
  }
  Clock& clock = clocks_[stream];
  for (const auto& [other, count] : seen) {
    clock[other] = std::max(clock[other], count);
  }
  if (forked) {
    ++clock[stream]; // A fork has to be joined even if nothing was done on it.
  }
}

void Capture::invalidate(const std::string& reason) {
  if (parent_) {
    parent_->invalidate(reason);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) {
    failure_ = reason;
  }
}

std::optional<std::string> Capture::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_ || !parent_ ? failure_ : parent_->failure();
}

std::optional<c10::Stream> Capture::unjoined_stream() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock& origin = clocks_[origin_];
  for (const auto& [stream, clock] : clocks_) {
    const auto own = clock.find(stream);
    if (stream == origin_ || own == clock.end()) {
      continue;
    }
    const auto seen = origin.find(stream);
    if (seen == origin.end() || seen->second < own->second) {
      return stream;
    }
  }
  return std::nullopt;
}

std::vector<Work> Capture::take_nodes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(nodes_, {});
}

std::vector<std::shared_ptr<void>> Capture::take_kept() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(kept_, {});
}

std::shared_ptr<Capture> begin_capture(const c10::Stream& origin, MempoolId_t pool, GraphCaptureMode mode) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  TORCH_CHECK(
      captured_streams.count(origin) == 0,
      "capture_begin: ",
      stream_name(origin),
      " is being captured already; end that capture first");
  auto capture = std::make_shared<Capture>(origin, std::move(pool), mode);
  captured_streams[origin] = capture;
  captures.push_back(capture);
  capture_count = captures.size();
  return capture;
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  release_streams(*capture);
  captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
  capture_count = captures.size();
}

void begin_body_capture(
    const std::shared_ptr<Capture>& capture,
    const c10::Stream& stream,
    std::shared_ptr<Conditional> node) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  captured_streams[stream] = std::make_shared<Capture>(stream, capture, std::move(node));
}

void end_body_capture(const std::shared_ptr<Capture>& body) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  release_streams(*body);
  captured_streams[body->origin()] = body->parent();
}

void check_joined(Capture& capture, const std::string& what) {
  const auto unjoined = capture.unjoined_stream();
  if (unjoined && !planted(Fault::kUnjoinedForkAllowed)) {
    capture.invalidate(
        what + ": " + stream_name(*unjoined) + " was forked from the capture and has not been joined; let " +
        stream_name(capture.origin()) + " wait for it before the end");
  }
}

void check_bodies_ended(Capture& capture, const std::string& what) {
  std::optional<c10::Stream> open;
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    for (const auto& [stream, captured_by] : captured_streams) {
      if (captured_by.get() != &capture && captured_by->is_in(capture)) {
        open = captured_by->origin();
      }
    }
  }
  if (open) {
    capture.invalidate(
        what + ": the body of a branch or a loop on " + stream_name(*open) +
        " has not been ended; call end_body before");
  }
}

bool any_capture() {
  return capture_count.load(std::memory_order_relaxed) != 0;
}

std::shared_ptr<Capture> capture_of(const c10::Stream& stream) {
  if (!any_capture()) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = captured_streams.find(stream);
  return found == captured_streams.end() ? nullptr : found->second;
}

void check_host_may_wait(HostWait kind, const std::string& what, const c10::Stream& stream) {
  check_wait(kind, what, stream);
}

void check_host_may_wait(HostWait kind, const std::string& what) {
  check_wait(kind, what, std::nullopt);
}

void check_not_captured(HostWait kind, const std::string& what, const c10::Stream& stream) {
  const auto capture = capture_of(stream);
  TORCH_CHECK(!capture || planted(fault_that_allows(kind)), refusal(kind, what, capture));
}

void check_thread_may_use(const c10::Stream& stream, const std::string& what) {
  std::shared_ptr<Capture> mine;
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    for (const auto& capture : captures) {
      if (capture->begun_by_this_thread() && capture->mode() != GraphCaptureMode::Relaxed) {
        mine = capture;
      }
    }
  }
  if (mine) {
    const std::string reason = "'" + what + "' was issued to " + stream_name(stream) +
        ", outside of the capture on " + stream_name(mine->origin()) +
        " that this thread has begun: it would be missing in the graph. Let the stream wait for an event recorded in "
        "the capture first, or work on the captured stream.";
    mine->invalidate(reason);
    TORCH_CHECK(false, reason);
  }
}

} // namespace backend
