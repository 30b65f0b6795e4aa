#include "devices.h"

#include "name.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

namespace backend {

namespace {

constexpr int kMostDevices = 16;

thread_local c10::DeviceIndex current = 0;

} // namespace

c10::DeviceIndex device_count() noexcept {
  static const auto count = [] {
    const char* value = std::getenv(DEVICE_ENVIRONMENT("DEVICES"));
    return static_cast<c10::DeviceIndex>(value == nullptr ? 2 : std::clamp(std::atoi(value), 1, kMostDevices));
  }();
  return count;
}

c10::DeviceIndex current_device() {
  return current;
}

c10::DeviceIndex checked_device(c10::DeviceIndex index) {
  if (index == -1) {
    return current;
  }
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "there is no device ",
      DEVICE_NAME,
      ":",
      static_cast<int>(index),
      "; there are ",
      static_cast<int>(device_count()));
  return index;
}

void set_current_device(c10::DeviceIndex index) {
  current = checked_device(index);
}

OnDevice::OnDevice(c10::DeviceIndex index) : before_(current) {
  current = index;
}

OnDevice::~OnDevice() {
  current = before_;
}

} // namespace backend
