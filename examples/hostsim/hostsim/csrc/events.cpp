#include "events.h"

#include "capture.h"
#include "faults.h"
#include "python.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace backend {

// One recording of an event: either in a queue, or in a capture, where it only stands for an order.
class Occurrence {
 public:
  explicit Occurrence(c10::Stream stream) : stream_(stream) {}
  Occurrence(c10::Stream stream, std::weak_ptr<Capture> capture, Clock clock)
      : stream_(stream), captured_(true), capture_(std::move(capture)), clock_(std::move(clock)) {}

  const c10::Stream& stream() const {
    return stream_;
  }

  bool captured() const {
    return captured_;
  }
  std::shared_ptr<Capture> capture() const {
    return capture_.lock();
  }
  const Clock& clock() const {
    return clock_;
  }

  void complete() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
      time_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }

  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

  void wait() {
    ReleaseGil release;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  std::chrono::steady_clock::time_point time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  const c10::Stream stream_;
  const bool captured_ = false;
  const std::weak_ptr<Capture> capture_;
  const Clock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point time_;
};

namespace {

void refuse(const std::shared_ptr<Capture>& capture, const std::string& reason) {
  capture->invalidate(reason);
  TORCH_CHECK(false, reason);
}

void block_in_capture(const Occurrence& occurrence, const c10::Stream& stream) {
  const auto capture = occurrence.capture();
  TORCH_CHECK(
      capture,
      stream_name(stream),
      " cannot wait for an event that was recorded in a capture which is over: record the event again");
  const auto other = capture_of(stream);
  if (other && other != capture) {
    const std::string reason =
        stream_name(stream) + " waits for an event of another capture; one stream belongs to one capture at a time";
    capture->invalidate(reason);
    refuse(other, reason);
  }
  if (!other && is_default_stream(stream)) {
    refuse(
        capture,
        stream_name(stream) +
            " cannot wait for an event recorded in a capture: the default stream cannot be captured. Fork to a "
            "stream of your own.");
  }
  capture->join(stream, occurrence.clock());
}

} // namespace

std::shared_ptr<Occurrence> Event::latest() {
  return std::atomic_load(&latest_);
}

void Event::record(const c10::Stream& stream) {
  TORCH_CHECK(
      stream.device_index() == device_,
      "an event of device ",
      static_cast<int>(device_),
      " cannot be recorded on ",
      stream_name(stream));
  if (auto capture = capture_of(stream)) {
    std::atomic_store(&latest_, std::make_shared<Occurrence>(stream, capture, capture->clock(stream)));
    return;
  }
  auto occurrence = std::make_shared<Occurrence>(stream);
  std::atomic_store(&latest_, occurrence);
  Work mark{"event record", [occurrence] { occurrence->complete(); }};
  mark.control = true;
  queue_of(stream).push(std::move(mark));
}

void Event::block(const c10::Stream& stream) {
  const auto occurrence = latest();
  if (!occurrence) {
    return;
  }
  if (occurrence->captured()) {
    block_in_capture(*occurrence, stream);
    return;
  }
  if (auto capture = capture_of(stream)) {
    refuse(
        capture,
        stream_name(stream) +
            " is being captured and was told to wait for work outside of the capture. Wait before it begins.");
  }
  if (planted(Fault::kEventsDoNotWait) || occurrence->done()) {
    return;
  }
  queue_of(stream).push({"event wait", [occurrence] { occurrence->wait(); }});
}

std::shared_ptr<Occurrence> Event::latest_for_host(const char* what) {
  auto occurrence = latest();
  if (!occurrence || !occurrence->captured()) {
    return occurrence;
  }
  if (planted(Fault::kCaptureAllowsSynchronize)) {
    return nullptr;
  }
  const std::string reason = std::string(what) +
      " an event that was recorded while capturing is not possible: it marks a place in the graph, not in time. "
      "Record the event again outside of the capture.";
  if (auto capture = occurrence->capture()) {
    refuse(capture, reason);
  }
  TORCH_CHECK(false, reason);
}

void Event::synchronize() {
  const auto occurrence = latest_for_host("synchronising");
  check_host_may_wait(HostWait::kSynchronize, "synchronising an event");
  if (occurrence) {
    occurrence->wait();
    queue_of(occurrence->stream()).raise_failure();
  }
}

bool Event::query() {
  const auto occurrence = latest_for_host("querying");
  check_host_may_wait(HostWait::kSynchronize, "querying an event");
  return !occurrence || occurrence->done();
}

bool Event::passed() {
  const auto occurrence = latest();
  return !occurrence || occurrence->done();
}

double Event::milliseconds_until(Event& later) {
  const auto from = latest_for_host("timing");
  const auto to = later.latest_for_host("timing");
  TORCH_CHECK(from && to, "both events must be recorded before the time between them can be told");
  TORCH_CHECK(from->done() && to->done(), "both events must be complete: synchronise the later one first");
  return std::chrono::duration<double, std::milli>(to->time() - from->time()).count();
}

void order_streams(const c10::Stream& before, const c10::Stream& after) {
  if (before == after) {
    return;
  }
  Event event(before.device_index());
  event.record(before);
  event.block(after);
}

} // namespace backend
