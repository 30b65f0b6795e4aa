// What Python asks by ctypes (hostcuda/__init__.py), and the report at exit (HOSTCUDA_REPORT).
#include "memory.h"
#include "modules.h"
#include "streams.h"

#include <cxxabi.h>

using namespace hostcuda;

namespace {
std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  free(text);
  return result;
}
// A line for each: how often, and its name. Answers how many bytes the text has; what does not fit is left out.
int write_lines(const Tally& tally, char* out, int size) {
  Lock lock(mutex());
  std::string text;
  for (auto& [name, count] : tally) text += std::to_string(count) + " " + demangled(name) + "\n";
  snprintf(out, size, "%s", text.c_str());
  return text.size();
}

struct Counter {
  const char* name;
  std::atomic<long long> Counters::*field;
};
#define COUNTER(name) {#name, &Counters::name}
const Counter kCounters[] = {
    COUNTER(kernels_run),     COUNTER(kernels_skipped), COUNTER(host_ops),       COUNTER(triton_launches),
    COUNTER(memcpys),         COUNTER(memsets),         COUNTER(modules),        COUNTER(captures),
    COUNTER(captures_failed), COUNTER(nodes_captured),  COUNTER(instantiations), COUNTER(graph_launches),
    COUNTER(nodes_run),       COUNTER(mallocs),         COUNTER(frees),          COUNTER(synchronizations),
    COUNTER(refused),         COUNTER(wild),            COUNTER(conditional_bodies),
};
#undef COUNTER

void report() {
  if (!env_on("HOSTCUDA_REPORT")) return;
  for (auto& [name, field] : kCounters)
    if (long long count = counters().*field) fprintf(stderr, "hostcuda: %s %lld\n", name, count);
  fprintf(stderr, "hostcuda: peak of memory %.1f MiB\n", usage().peak / 1048576.0);
  auto list = [](const char* what, const Tally& tally) {
    for (auto& [name, count] : tally)
      fprintf(stderr, "hostcuda: %s, %lld times: %s\n", what, count, demangled(name).substr(0, 300).c_str());
  };
  list("not computed", skipped());
  list("refused", refusals());
  list("not there", missing());
}
struct AtExit {
  AtExit() { atexit(report); }
} at_exit;
} // namespace

API long long hostcuda_counter(const char* name) {
  for (auto& [known, field] : kCounters)
    if (!strcmp(name, known)) return counters().*field;
  Lock lock(mutex());
  if (!strcmp(name, "used_bytes")) return usage().used;
  if (!strcmp(name, "peak_bytes")) return usage().peak;
  if (!strcmp(name, "active_captures")) return active_captures().size();
  return -1;
}
API int hostcuda_skipped(char* out, int size) { return write_lines(skipped(), out, size); }
API int hostcuda_refusals(char* out, int size) { return write_lines(refusals(), out, size); }
API int hostcuda_missing(char* out, int size) { return write_lines(missing(), out, size); }

API const char* hostcuda_identity(const char* data, long long size) {
  static thread_local std::string text;
  text = identity_of(data, size);
  return text.c_str();
}
