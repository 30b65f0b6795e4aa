#include "conditional.h"

#include "aliases.h"
#include "capture.h"
#include "devices.h"
#include "faults.h"
#include "name.h"
#include "python.h"
#include "queue.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace backend {

namespace {

// The address of a predicate. What it refuses leaves the capture as it was: nothing has been recorded.
const bool* checked_predicate(const at::Tensor& predicate, const std::string& what) {
  TORCH_CHECK(
      predicate.device() == c10::Device(kDevice, current_device()) && predicate.scalar_type() == at::kBool &&
          predicate.dim() == 0,
      what,
      ": a predicate is a boolean without dimensions on " DEVICE_NAME ":",
      static_cast<int>(current_device()),
      "; this is ",
      predicate.scalar_type(),
      " of size ",
      predicate.sizes(),
      " on ",
      predicate.device());
  return predicate.const_data_ptr<bool>();
}

std::shared_ptr<Capture> current_capture(const std::string& what) {
  const c10::Stream stream = current_stream(current_device());
  auto capture = capture_of(stream);
  TORCH_CHECK(
      capture, what, ": nothing is captured on ", stream_name(stream), "; a node that decides is one of a graph");
  return capture;
}

void begin(const at::Tensor& predicate, bool repeats) {
  const std::string what = repeats ? "begin_loop" : "begin_branch";
  const bool* address = checked_predicate(predicate, what);
  const auto capture = current_capture(what);
  auto node = std::make_shared<Conditional>(Conditional{repeats, address});
  begin_body_capture(capture, current_stream(current_device()), std::move(node));
}

} // namespace

void begin_branch(const at::Tensor& predicate) {
  begin(predicate, false);
}

void begin_loop(const at::Tensor& predicate) {
  begin(predicate, true);
}

void set_condition(const at::Tensor& predicate) {
  const bool* address = checked_predicate(predicate, "set_condition");
  const auto capture = current_capture("set_condition");
  const auto node = capture->node();
  TORCH_CHECK(
      node && node->repeats, "set_condition: what is captured is not the body of a loop; call begin_loop first");
  capture->record(
      current_stream(current_device()),
      {"set condition", [value = node->value, address] { *value = *address; }, {range_of(predicate, false)}});
  node->is_set = true;
}

void end_body() {
  const c10::Stream stream = current_stream(current_device());
  const auto capture = current_capture("end_body");
  const auto node = capture->node();
  TORCH_CHECK(
      node, "end_body: no body is captured on ", stream_name(stream), "; call begin_branch or begin_loop first");
  TORCH_CHECK(
      stream == capture->origin(),
      "end_body was called on ",
      stream_name(stream),
      ", but the body has begun on ",
      stream_name(capture->origin()),
      "; make that stream current again before");
  if (node->repeats && !node->is_set) {
    capture->invalidate("end_body: the loop would never end; call set_condition in its body");
  }
  check_bodies_ended(*capture, "end_body");
  check_joined(*capture, "end_body");
  end_body_capture(capture);
  if (const auto failure = capture->failure()) {
    TORCH_CHECK(false, "the capture has failed: ", *failure);
  }
  node->body = capture->take_nodes();
  Work work{node->repeats ? "while" : "if", {}};
  work.memory.push_back({const_cast<bool*>(node->predicate), sizeof(bool), false});
  work.conditional = node;
  capture->parent()->record(stream, std::move(work));
}

void run_conditional(const Conditional& node, const std::function<void()>& run_body) {
  *node.value = *node.predicate || (!node.repeats && planted(Fault::kBranchAlwaysRuns));
  // A loop that never ends must not keep the process from ending.
  while (*node.value && !queues_stopped()) {
    run_body();
    if (!node.repeats || planted(Fault::kLoopRunsOnce)) {
      return;
    }
    if (!asynchronous()) {
      check_signals(); // Nor whoever runs it here from being interrupted.
    }
  }
}

} // namespace backend
