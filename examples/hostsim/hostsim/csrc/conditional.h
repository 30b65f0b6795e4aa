#pragma once

#include "work.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace backend {

// A node of a graph that decides at each replay whether its body runs, or how often.
struct Conditional {
  bool repeats; // A loop: its body runs while the value is true, and otherwise once, if it is.
  const bool* predicate; // The value, read when the node is reached.
  // Of its own, so that the nodes that set it need not own the node that they are in.
  std::shared_ptr<bool> value = std::make_shared<bool>(false);
  bool is_set = false; // Whether the body of a loop says what the value is from then on.
  std::vector<Work> body = {};
};

// While the current stream is captured: what is issued to it from now on, until end_body, is the body of a node that is
// reached here. The predicate is a boolean without dimensions.
void begin_branch(const at::Tensor& predicate);
void begin_loop(const at::Tensor& predicate);
// In the body of a loop, usually last: whether it runs again, read when this is reached.
void set_condition(const at::Tensor& predicate);
void end_body();

// A node of either kind is reached in a replay.
void run_conditional(const Conditional& node, const std::function<void()>& run_body);

} // namespace backend
