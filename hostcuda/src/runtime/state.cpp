#include "state.h"

namespace hostcuda {

// None of these is ever destroyed: libraries call while the process ends.
std::recursive_mutex& mutex() {
  static auto* one = new std::recursive_mutex;
  return *one;
}
Counters& counters() {
  static auto* one = new Counters;
  return *one;
}
Tally& skipped() {
  static auto* one = new Tally;
  return *one;
}
Tally& refusals() {
  static auto* one = new Tally;
  return *one;
}
Tally& missing() {
  static auto* one = new Tally;
  return *one;
}
void count_skipped(const std::string& kernel) {
  Lock lock(mutex());
  counters().kernels_skipped++;
  skipped()[kernel]++;
}

} // namespace hostcuda
