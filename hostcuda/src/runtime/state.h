// The state that all parts share: one mutex, counters, the last and the sticky error, what was refused.
//
// The mutex is never held while work runs: work takes Python's lock (Triton's interpreter), and whoever has Python's
// lock may be waiting for this mutex.
#pragma once
#include "../hostcuda.h"
#include "settings.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace hostcuda {

using Lock = std::unique_lock<std::recursive_mutex>;
std::recursive_mutex& mutex();

// Names are what Python asks for: report.cpp has the list.
struct Counters {
  std::atomic<long long> kernels_run{0}, kernels_skipped{0}, host_ops{0}, triton_launches{0}, memcpys{0}, memsets{0},
      modules{0}, captures{0}, captures_failed{0}, nodes_captured{0}, instantiations{0}, graph_launches{0},
      nodes_run{0}, conditional_bodies{0}, mallocs{0}, frees{0}, synchronizations{0}, refused{0}, wild{0};
};
Counters& counters();

using Tally = std::map<std::string, long long>;
Tally& skipped();  // kernels that were launched and not computed
Tally& refusals(); // calls that were answered with an error
Tally& missing();  // functions that somebody looked up and that the device does not have
void count_skipped(const std::string& kernel);

// -- errors (errors.cpp) --

// After a fault of the device every call answers with it, until the process ends (or hostcuda_clear_sticky).
// Runtime API, "Error Handling" and the descriptions of cudaErrorIllegalAddress and cudaErrorLaunchFailure.
extern std::atomic<int> sticky;
cudaError_t done(cudaError_t error);                     // the error is what cudaGetLastError says
cudaError_t sticky_error();                              // of an earlier fault, or success
cudaError_t refuse(const char* call, cudaError_t error); // done(), and remembered in refusals()
void device_fault(const std::exception& error);          // work has failed: a sticky error

// Runs a function of the API that may run work; what the work throws becomes the sticky error.
template <typename Work>
cudaError_t guarded(Work work) {
  try {
    return work();
  } catch (const std::exception& error) {
    device_fault(error);
    return sticky_error();
  }
}

} // namespace hostcuda
