#pragma once
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace hostcuda::operators {

class Call {
 public:
  // Raises where a tensor is on another device than the operator takes.
  Call(const c10::OperatorHandle& op, Stack arguments);
  Stack run();

 private:
  // The arguments as the CPU's kernel takes them, and the memory that it touches.
  struct OnHost {
    Stack arguments;
    std::vector<Range> ranges;
    int generator_at = -1;
    std::optional<at::Generator> generator;
  };

  bool returns_values() const;
  bool leaves_statistics_empty() const;
  bool is_written_list(size_t argument) const;
  bool writes_to_host() const;
  size_t returned_as(const c10::Argument& result) const; // which argument it aliases
  OnHost on_host() const;
  std::optional<Stack> meta_results(Stack* meta_arguments, std::string* why_not) const;
  void lay_out_convolution(Stack* results) const;
  at::Tensor iterated(const Stack& meta_arguments, const at::Tensor& like) const;
  void resize_outputs(const Stack& meta_arguments);
  Stack defer();                         // the work is issued to the stream
  Stack run_now(const std::string& why); // the stream is waited for: refused in a capture

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string base_, name_;
  Stack arguments_;
};

} // namespace hostcuda::operators
