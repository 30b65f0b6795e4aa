#include "generator.h"

#include "capture.h"
#include "devices.h"
#include "name.h"
#include "rules.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <vector>

namespace backend {

namespace {

std::atomic<bool> generators_held{false};

// A generator of the CPU under the device's name. Draws happen when work runs: its state is only known, and may only
// be changed, once all work that was issued before has run. Reading it is allowed in a capture, as with CUDA, whose
// generator's state is on the host.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const {
    return cpu_;
  }

  void set_current_seed(uint64_t seed) override {
    // As ATen/cuda/CUDAGeneratorImpl.cpp, set_current_seed: it raises, and the capture goes on.
    if (capture_of(current_stream(device().index()))) {
      TORCH_CHECK(
          seed == cpu_.current_seed(),
          "seeding a generator while a graph is captured is possible with the seed that it has only");
      return;
    }
    wait_for_draws("seeding a generator");
    cpu_.set_current_seed(seed);
  }
  uint64_t seed() override {
    wait_for_draws("seeding a generator");
    return cpu_.seed();
  }
  uint64_t current_seed() const override {
    return cpu_.current_seed();
  }
  void set_offset(uint64_t offset) override {
    wait_for_draws("setting a generator's offset");
    cpu_.set_offset(offset);
  }
  uint64_t get_offset() const override {
    drain_device(device().index());
    return cpu_.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    wait_for_draws("setting a generator's state");
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    drain_device(device().index());
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  DeviceGenerator* clone_impl() const override {
    drain_device(device().index());
    return new DeviceGenerator(device().index(), cpu_.clone());
  }

  void wait_for_draws(const char* what) const {
    for (const auto& stream : streams_of(device().index())) {
      check_host_may_wait(HostWait::kSynchronize, what, stream);
    }
    drain_device(device().index());
  }

  at::Generator cpu_;
};

} // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(checked_device(device), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* result = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      result->push_back(new_generator(index));
    }
    return result;
  }();
  return (*generators)[checked_device(device)];
}

void hold_generators(bool held) {
  generators_held = held;
}

at::Generator checked_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  TORCH_CHECK(
      !generators_held || !in_force(Rule::kFailedCaptureHoldsGenerators) || capture_of(current_stream(device)),
      "a random number outside of captures: a capture has failed, and none has ended well since");
  if (!generator || !generator->defined()) {
    return default_generator(device);
  }
  TORCH_CHECK(
      generator->device().type() == kDevice,
      "Expected a '",
      DEVICE_NAME,
      "' device type for generator but found '",
      generator->device(),
      "'");
  return *generator;
}

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

} // namespace backend
