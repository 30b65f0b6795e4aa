// What c10 asks a device for: the current device and stream, events, waiting.

#include "allocator.h"
#include "capture.h"
#include "devices.h"
#include "events.h"
#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace backend {

namespace {

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDevice, current_device()};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < backend::device_count()) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return backend::device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // Every type.
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_from_pool(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_from_pool(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return capture_of(stream) != nullptr;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new Event(device == -1 ? stream.device_index() : device);
    }
    static_cast<Event*>(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->block(stream);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->synchronize();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* earlier, void* later, const c10::DeviceIndex) const override {
    TORCH_CHECK(earlier && later, "both events must be recorded before the time between them can be told");
    return static_cast<Event*>(earlier)->milliseconds_until(*static_cast<Event*>(later));
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

} // namespace backend
