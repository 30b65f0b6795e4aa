#pragma once

#include <ATen/core/Generator.h>

namespace backend {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The CPU generator that a device's generator draws from. `generator` is what the caller of an operator passed: none
// means the device's default; one of another device is an error.
// Whether generators draw for captures only: one has failed, and nothing has put them right.
void hold_generators(bool held);
at::Generator checked_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device);
at::Generator cpu_generator(const at::Generator& generator);

} // namespace backend
