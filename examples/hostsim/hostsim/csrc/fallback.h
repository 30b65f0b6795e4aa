#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace backend {

// Any operator: its CPU kernel, called on the device's memory when the stream gets there.
void run_on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// What surrounds a call of a CPU or meta kernel: below autograd and autocast, wherever it is called from.
class KernelGuard {
 public:
  KernelGuard();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

} // namespace backend
