#pragma once

#include <array>
#include <string>
#include <vector>

namespace backend {

// What torch does on CUDA and a kinder device need not: in force unless relaxed, so that who runs here runs there.
enum class Rule {
  kPoolDiesWithItsLastGraph,
  kFailedCaptureHoldsItsPool,
  kFailedCaptureSpoilsItsPool,
  kFailedCaptureHoldsGenerators,
  kWorkspaceBelongsToThreadAndStream,
  kLibrariesBeginOutsideOfCaptures,
  kCacheStaysWhileCapturing,
  kCount,
};

struct RuleDescription {
  const char* name;
  const char* effect;
  const char* source; // File and versions of torch.
};

extern const std::array<RuleDescription, static_cast<size_t>(Rule::kCount)> rule_table;

bool in_force(Rule rule);
void relax(const std::string& name);
void enforce_all_rules();
std::vector<std::string> relaxed_rules();

} // namespace backend
