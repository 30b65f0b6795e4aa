#pragma once

#include "work.h"

#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <ostream>
#include <unordered_map>
#include <vector>

namespace backend {

// What a capture has become: nodes in an order in which they may run. Immutable but for what planted faults remember.
class Program {
 public:
  Program(std::vector<Work> nodes, std::vector<std::shared_ptr<void>> kept, c10::MempoolId_t pool);

  size_t size() const {
    return nodes_.size();
  }
  size_t size_with_bodies() const;
  // That the memory its nodes are bound to has not been given back.
  void check_memory() const;
  void run();
  void print(std::ostream& out) const;

 private:
  // Those of the program, or of a body in it.
  void note_nodes(const std::vector<Work>& nodes, c10::MempoolId_t pool);
  void run_nodes();
  void replay_generators();
  void run_with_first_inputs();

  const std::vector<Work> nodes_;
  const std::vector<std::shared_ptr<void>> kept_;
  std::unordered_map<const void*, uint64_t> blocks_; // For every address outside of the pool, its block.
  std::vector<MemoryRange> inputs_; // What is read and was not made by the graph.

  std::mutex mutex_; // A graph runs once at a time, whatever the streams.
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> first_generator_states_;
  std::vector<std::vector<char>> first_inputs_;
};

} // namespace backend
