#include "streams.h"

#include "capture.h"
#include "name.h"
#include "python.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace backend {

namespace {

constexpr c10::StreamId kDefaultId = 0;
constexpr size_t kPoolSize = 32;

struct DeviceStreams {
  std::array<Queue, kPoolSize + 1> queues; // The default stream's comes first.
  std::atomic<size_t> handed_out{0};
};

// Not destroyed at exit: the threads that serve the queues may still run.
std::vector<std::unique_ptr<DeviceStreams>>& all_streams() {
  static auto* streams = [] {
    auto* result = new std::vector<std::unique_ptr<DeviceStreams>>();
    for (int device = 0; device < device_count(); ++device) {
      result->push_back(std::make_unique<DeviceStreams>());
    }
    return result;
  }();
  return *streams;
}

thread_local std::vector<c10::StreamId> current_ids;

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

} // namespace

c10::Stream default_stream(c10::DeviceIndex device) {
  return make_stream(checked_device(device), kDefaultId);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  device = checked_device(device);
  return make_stream(device, static_cast<size_t>(device) < current_ids.size() ? current_ids[device] : kDefaultId);
}

c10::Stream exchange_current_stream(const c10::Stream& stream) {
  queue_of(stream); // Raises for a stream that does not exist.
  c10::Stream before = current_stream(stream.device_index());
  current_ids.resize(device_count(), kDefaultId);
  current_ids[stream.device_index()] = stream.id();
  return before;
}

c10::Stream stream_from_pool(c10::DeviceIndex device) {
  device = checked_device(device);
  const size_t turn = all_streams()[device]->handed_out++;
  return make_stream(device, static_cast<c10::StreamId>(turn % kPoolSize + 1));
}

bool is_default_stream(const c10::Stream& stream) {
  return stream.id() == kDefaultId;
}

std::string stream_name(const c10::Stream& stream) {
  const std::string device = std::string(DEVICE_NAME) + ":" + std::to_string(stream.device_index());
  return is_default_stream(stream) ? "the default stream of " + device
                                   : "stream " + std::to_string(stream.id()) + " of " + device;
}

Queue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(
      stream.device_type() == kDevice && stream.id() >= 0 && stream.id() <= static_cast<c10::StreamId>(kPoolSize),
      "not a stream of the device '",
      DEVICE_NAME,
      "': ",
      stream);
  return all_streams()[checked_device(stream.device_index())]->queues[stream.id()];
}

std::vector<c10::Stream> streams_of(c10::DeviceIndex device) {
  const size_t count = std::min(all_streams()[device]->handed_out.load(), kPoolSize);
  std::vector<c10::Stream> result;
  for (size_t id = 0; id <= count; ++id) {
    result.push_back(make_stream(device, static_cast<c10::StreamId>(id)));
  }
  return result;
}

bool device_idle(c10::DeviceIndex device) {
  const auto streams = streams_of(device);
  return std::all_of(streams.begin(), streams.end(), [](const auto& stream) { return queue_of(stream).idle(); });
}

void drain_device(c10::DeviceIndex device) {
  for (const auto& stream : streams_of(device)) {
    queue_of(stream).drain();
  }
}

void issue(const c10::Stream& stream, Work work) {
  if (any_capture()) {
    if (auto capture = capture_of(stream)) {
      capture->record(stream, std::move(work));
      return;
    }
    check_thread_may_use(stream, work.name);
  }
  queue_of(stream).push(std::move(work));
}

void synchronize_stream(const c10::Stream& stream) {
  check_host_may_wait(HostWait::kSynchronize, "synchronising " + stream_name(stream), stream);
  queue_of(stream).wait();
}

void synchronize_device(c10::DeviceIndex device) {
  device = checked_device(device);
  const auto streams = streams_of(device);
  for (const auto& stream : streams) {
    check_host_may_wait(
        HostWait::kSynchronize, "synchronising " DEVICE_NAME ":" + std::to_string(device), stream);
  }
  std::exception_ptr failure;
  for (const auto& stream : streams) {
    try {
      queue_of(stream).wait();
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

bool query_stream(const c10::Stream& stream) {
  check_host_may_wait(HostWait::kSynchronize, "querying " + stream_name(stream), stream);
  return queue_of(stream).idle();
}

void set_asynchronous(bool value) {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    synchronize_device(device);
  }
  set_asynchronous_mode(value);
}

void delay(const c10::Stream& stream, double seconds) {
  const auto sleep = [seconds] {
    ReleaseGil release;
    const auto begin = std::chrono::steady_clock::now();
    const std::chrono::duration<double> whole(seconds), slice(0.02);
    for (auto left = whole; !queues_stopped() && left.count() > 0;) {
      std::this_thread::sleep_for(std::min(slice, left)); // In slices, for the process may end meanwhile.
      left = whole - (std::chrono::steady_clock::now() - begin);
    }
  };
  issue(stream, {"delay", sleep});
}

void shut_down() {
  stop_queues();
  ReleaseGil release;
  // Long enough for the work that runs now; work that never ends must not keep the process from ending.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    while (!device_idle(device) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

} // namespace backend
