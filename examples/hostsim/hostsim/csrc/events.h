#pragma once

#include <c10/core/Stream.h>

#include <memory>

namespace backend {

class Occurrence;

// A point in a stream's work. Recording it again moves it; those who wait for the earlier point still get that one.
class Event {
 public:
  explicit Event(c10::DeviceIndex device) : device_(device) {}
  c10::DeviceIndex device() const {
    return device_;
  }

  void record(const c10::Stream& stream);
  // Work issued to the stream from now on waits; the host does not.
  void block(const c10::Stream& stream);
  void synchronize();
  bool query();
  // As query, for who may look at any time.
  bool passed();
  double milliseconds_until(Event& later);

 private:
  std::shared_ptr<Occurrence> latest();
  // One that the host may look at: raises if it belongs to a capture.
  std::shared_ptr<Occurrence> latest_for_host(const char* what);

  const c10::DeviceIndex device_;
  std::shared_ptr<Occurrence> latest_; // Through std::atomic_load and std::atomic_store only.
};

// Work of `after` comes after everything that `before` was given so far.
void order_streams(const c10::Stream& before, const c10::Stream& after);

} // namespace backend
