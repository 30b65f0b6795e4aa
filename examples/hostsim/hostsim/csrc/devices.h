#pragma once

#include <c10/core/Device.h>

#include <cstdlib>

namespace backend {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

inline bool environment_flag(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && *value != '0';
}

c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// -1 means the current device; anything that does not exist is an error.
c10::DeviceIndex checked_device(c10::DeviceIndex index);

// Makes a device current as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex index);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

} // namespace backend
