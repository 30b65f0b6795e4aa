// What the environment says, read once; and the trace.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// A function of the C interface.
#define API extern "C" __attribute__((visibility("default")))

namespace hostcuda {

inline bool env_is(const char* name, const char* value) {
  const char* text = getenv(name);
  return text && !strcmp(text, value);
}
inline bool env_on(const char* name) {
  const char* text = getenv(name);
  return text && *text && *text != '0';
}
// A number with K, M or G after it.
inline size_t env_size(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  double value = strtod(text, &end);
  switch (*end) {
    case 'K': case 'k': value *= 1 << 10; break;
    case 'M': case 'm': value *= 1 << 20; break;
    case 'G': case 'g': value *= 1 << 30; break;
  }
  return static_cast<size_t>(value);
}

inline const bool kTrace = env_on("HOSTCUDA_TRACE");
// New device memory is 0xff: NaN in every floating type, and an index out of bounds.
inline const bool kPoison = env_on("HOSTCUDA_POISON");
// Nodes of a graph run in the last order that their dependencies allow, not in the order of the capture.
inline const bool kLifo = env_is("HOSTCUDA_ORDER", "lifo");
// Work waits until somebody has to wait for it, and then only what that needs runs.
inline const bool kLazy = env_on("HOSTCUDA_LAZY");
// Kernels, and what moves or sets bytes of the device, do nothing: what is left is host time and memory. The
// operators may be registered (HOSTCUDA_COMPUTE=0) or torch's own (HOSTCUDA_OPERATORS=0).
inline const bool kComputes = !env_is("HOSTCUDA_COMPUTE", "0") && !env_is("HOSTCUDA_OPERATORS", "0");
// Iterations of one WHILE node before the device takes it for endless.
inline const size_t kLoops = env_size("HOSTCUDA_LOOPS", 1ull << 20);
inline const size_t kTotalMemory = env_size("HOSTCUDA_MEMORY", 80ull << 30);

} // namespace hostcuda

#define TRACE(...)                                              \
  do {                                                          \
    if (hostcuda::kTrace) {                                     \
      fprintf(stderr, "hostcuda[%ld]: ", syscall(SYS_gettid));  \
      fprintf(stderr, __VA_ARGS__);                             \
      fputc('\n', stderr);                                      \
    }                                                           \
  } while (0)
