#pragma once

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace backend {

struct Conditional;

struct MemoryRange {
  void* data;
  size_t bytes;
  bool written;
};

// One thing the device does: run at once, put into a stream's queue, or recorded as a node of a graph. It is bound to
// addresses, not to tensors that own memory, so that it keeps no memory alive which the program has freed.
struct Work {
  std::string name;
  std::function<void()> run;
  std::vector<MemoryRange> memory = {};
  // The device's generator that it draws from.
  std::optional<at::Generator> generator = std::nullopt;
  // Others wait for it, so that it runs even when the process ends and everything else is dropped.
  bool control = false;
  // Of a node that decides: it has a body instead of something to run.
  std::shared_ptr<const Conditional> conditional = nullptr;
};

} // namespace backend
