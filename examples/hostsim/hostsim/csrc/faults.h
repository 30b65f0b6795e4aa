#pragma once

#include <array>
#include <atomic>
#include <string>
#include <vector>

namespace backend {

// Mistakes that an implementation of a device might make, to be switched on by a test-suite that has to prove that it
// notices them. All are off unless planted; asking costs one load.
enum class Fault {
  kReplayIgnoresRefilledInputs,
  kReplaySkipsLastNode,
  kReplayOnDefaultStream,
  kGeneratorNotAdvanced,
  kPoolNotShared,
  kPoolMemoryNotKept,
  kCaptureAllowsItem,
  kCaptureAllowsSynchronize,
  kCaptureAllowsPageableCopy,
  kCaptureOnDefaultStreamAllowed,
  kRecaptureWithoutResetAllowed,
  kUnjoinedForkAllowed,
  kEventsDoNotWait,
  kRecordStreamIgnored,
  kNoPoison,
  kStorageOffsetDropped,
  kNonBlockingCopyTooLate,
  kBranchAlwaysRuns,
  kLoopRunsOnce,
  kCount,
};

struct FaultDescription {
  const char* name;
  const char* effect;
};

extern const std::array<FaultDescription, static_cast<size_t>(Fault::kCount)> fault_table;

bool planted(Fault fault);
void plant_fault(const std::string& name);
void clear_faults();
std::vector<std::string> planted_faults();

} // namespace backend
