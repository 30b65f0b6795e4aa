#include "program.h"

#include "allocator.h"
#include "conditional.h"
#include "faults.h"
#include "generator.h"
#include "graph.h"
#include "python.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace backend {

namespace {

std::vector<char> bytes_of(const MemoryRange& range) {
  const char* data = static_cast<const char*>(range.data);
  return {data, data + range.bytes};
}

size_t count_nodes(const std::vector<Work>& nodes) {
  size_t count = nodes.size();
  for (const Work& node : nodes) {
    count += node.conditional ? count_nodes(node.conditional->body) : 0;
  }
  return count;
}

// Nodes of a body are numbered after that of the body: 3.0, 3.1. `place` is what comes before.
void run(const std::vector<Work>& nodes, size_t count, const std::string& place) {
  for (size_t i = 0; i < count; ++i) {
    const std::string number = place + std::to_string(i);
    if (nodes[i].conditional) {
      const std::vector<Work>& body = nodes[i].conditional->body;
      run_conditional(*nodes[i].conditional, [&] {
        run(body, body.size(), number + ".");
        count_body(body.size());
      });
      continue;
    }
    try {
      nodes[i].run();
    } catch (...) {
      const std::string reason = describe_current_exception();
      TORCH_CHECK(false, "node ", number, " ('", nodes[i].name, "') of a graph failed in its replay: ", reason);
    }
  }
}

void print_nodes(const std::vector<Work>& nodes, const std::string& place, std::ostream& out) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::string number = place + std::to_string(i);
    out << number << " " << nodes[i].name;
    for (const MemoryRange& range : nodes[i].memory) {
      out << (range.written ? " writes " : " reads ") << range.data << "+" << range.bytes;
    }
    out << "\n";
    if (nodes[i].conditional) {
      print_nodes(nodes[i].conditional->body, number + ".", out);
    }
  }
}

} // namespace

Program::Program(std::vector<Work> nodes, std::vector<std::shared_ptr<void>> kept, c10::MempoolId_t pool)
    : nodes_(std::move(nodes)), kept_(std::move(kept)) {
  note_nodes(nodes_, pool);
}

size_t Program::size_with_bodies() const {
  return count_nodes(nodes_);
}

void Program::note_nodes(const std::vector<Work>& nodes, c10::MempoolId_t pool) {
  for (const Work& node : nodes) {
    for (const MemoryRange& range : node.memory) {
      const uint64_t block = block_at(range.data);
      if (block == 0 || pool_at(range.data) == pool) {
        continue;
      }
      blocks_[range.data] = block;
      const bool known = std::any_of(
          inputs_.begin(), inputs_.end(), [&](const MemoryRange& input) { return input.data == range.data; });
      if (!known && !range.written) {
        inputs_.push_back(range);
      }
    }
    if (node.generator) {
      generators_.push_back(*node.generator);
    }
    if (node.conditional) {
      note_nodes(node.conditional->body, pool);
    }
  }
}

void Program::check_memory() const {
  for (const auto& [address, block] : blocks_) {
    TORCH_CHECK(
        block_at(address) == block,
        "replay: memory that the graph was captured with has been given back. Keep its inputs alive as long as the "
        "graph, and refill them.");
  }
}

void Program::run() {
  ReleaseGil release;
  std::lock_guard<std::mutex> lock(mutex_);
  if (planted(Fault::kGeneratorNotAdvanced)) {
    replay_generators();
  }
  if (planted(Fault::kReplayIgnoresRefilledInputs)) {
    run_with_first_inputs();
  } else {
    run_nodes();
  }
}

void Program::run_nodes() {
  const size_t count = nodes_.size() - (planted(Fault::kReplaySkipsLastNode) && !nodes_.empty() ? 1 : 0);
  backend::run(nodes_, count, "");
}

void Program::replay_generators() {
  if (first_generator_states_.empty()) {
    for (const at::Generator& generator : generators_) {
      first_generator_states_.push_back(cpu_generator(generator).get_state());
    }
  }
  for (size_t i = 0; i < generators_.size(); ++i) {
    cpu_generator(generators_[i]).set_state(first_generator_states_[i]);
  }
}

void Program::run_with_first_inputs() {
  if (first_inputs_.empty()) {
    std::transform(inputs_.begin(), inputs_.end(), std::back_inserter(first_inputs_), bytes_of);
  }
  std::vector<std::vector<char>> refilled;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    refilled.push_back(bytes_of(inputs_[i]));
    std::memcpy(inputs_[i].data, first_inputs_[i].data(), inputs_[i].bytes);
  }
  run_nodes();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    // What the graph itself has changed stays changed.
    if (bytes_of(inputs_[i]) == first_inputs_[i]) {
      std::memcpy(inputs_[i].data, refilled[i].data(), inputs_[i].bytes);
    }
  }
}

void Program::print(std::ostream& out) const {
  print_nodes(nodes_, "", out);
}

} // namespace backend
