// The functions behind device.py: what torch has no common name for, or needs under the device's own.

#include "allocator.h"
#include "capture.h"
#include "conditional.h"
#include "devices.h"
#include "faults.h"
#include "generator.h"
#include "graph.h"
#include "host_allocator.h"
#include "launch.h"
#include "name.h"
#include "placements.h"
#include "rules.h"
#include "streams.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace {

namespace py = pybind11;
using namespace backend;

py::dict pool_as_dict(MempoolId_t pool) {
  const PoolStatistics statistics = pool_statistics(pool);
  py::dict result;
  result["allocated"] = statistics.allocated;
  result["peak_allocated"] = statistics.peak_allocated;
  result["reserved"] = statistics.reserved;
  result["peak_reserved"] = statistics.peak_reserved;
  result["blocks"] = statistics.blocks;
  result["allocations"] = statistics.allocations;
  result["graphs"] = statistics.graphs;
  return result;
}

py::dict counters_as_dict() {
  const GraphCounters counters = graph_counters();
  py::dict result;
  result["captures"] = counters.captures;
  result["replays"] = counters.replays;
  result["nodes_captured"] = counters.nodes_captured;
  result["nodes_replayed"] = counters.nodes_replayed;
  result["bodies_run"] = counters.bodies_run;
  result["live_graphs"] = counters.live_graphs;
  return result;
}

py::dict faults_as_dict() {
  py::dict result;
  for (const FaultDescription& fault : fault_table) {
    result[fault.name] = fault.effect;
  }
  return result;
}

py::dict rules_as_dict() {
  py::dict result;
  for (const RuleDescription& rule : rule_table) {
    result[rule.name] = py::make_tuple(rule.effect, rule.source);
  }
  return result;
}

py::capsule as_capsule(std::shared_ptr<Placing> placing) {
  return {new std::shared_ptr<Placing>(std::move(placing)), [](void* held) {
            delete static_cast<std::shared_ptr<Placing>*>(held);
          }};
}

std::shared_ptr<Placing> placing_in(const py::object& capsule) {
  return *py::cast<py::capsule>(capsule).get_pointer<std::shared_ptr<Placing>>();
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("NAME") = DEVICE_NAME;

  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);

  m.def("default_stream", [](c10::DeviceIndex device) { return default_stream(device); });
  m.def("is_capturing", [](c10::DeviceIndex device) { return capture_of(current_stream(device)) != nullptr; });
  m.def("asynchronous", &asynchronous);
  m.def("set_asynchronous", &set_asynchronous);
  m.def("delay", [](c10::DeviceIndex device, c10::StreamId id, double seconds) {
    delay(c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id), seconds);
  });
  m.def("shut_down", &shut_down);

  m.def("graph_pool_handle", &pool_handle);
  m.def("pool_stats", &pool_as_dict);
  m.def("end_allocate_to_pool", &end_allocate_to_pool);
  m.def("release_pool", &release_pool);
  // No class: when the library is built, this function runs twice, and a class is registered once.
  m.def("placing_at", [](std::vector<uintptr_t> addresses) {
    return as_capsule(std::make_shared<Placing>(std::move(addresses)));
  });
  m.def("placing_without_memory", [](uintptr_t first) { return as_capsule(std::make_shared<Placing>(first)); });
  m.def("place_by", [](const py::object& capsule) { place_by(capsule.is_none() ? nullptr : placing_in(capsule)); });
  m.def("placing_made", [](const py::object& capsule) { return placing_in(capsule)->made(); });
  m.def("placing_in_use", [](const py::object& capsule) { return placing_in(capsule)->in_use(); });
  m.def("placing_left", [](const py::object& capsule) { return placing_in(capsule)->left(); });
  m.def("addresses_without_memory", &addresses_without_memory);
  m.def("set_memory_fraction", &set_memory_fraction);
  m.def("memory_fraction", &memory_fraction);
  m.def("fail_allocations", &fail_allocations);
  m.def("allocations_wanted", &allocations_wanted);
  m.def("poison", &poison);
  m.def("set_poison", &set_poison);

  m.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });

  m.def("graph_counters", &counters_as_dict);
  m.def("reset_graph_counters", &reset_graph_counters);
  m.def("launch", &launch);

  m.def("begin_branch", &begin_branch);
  m.def("begin_loop", &begin_loop);
  m.def("set_condition", &set_condition);
  m.def("end_body", &end_body);

  m.def("known_rules", &rules_as_dict);
  m.def("relax", &relax);
  m.def("enforce_all_rules", &enforce_all_rules);
  m.def("relaxed_rules", &relaxed_rules);

  m.def("known_faults", &faults_as_dict);
  m.def("plant_fault", &plant_fault);
  m.def("clear_faults", &clear_faults);
  m.def("planted_faults", &planted_faults);
}
