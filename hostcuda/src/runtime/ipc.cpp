// Device memory of another process: its file, opened through /proc.
#include "memory.h"
#include "streams.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace hostcuda;

namespace {
struct Handle {
  int pid, file;
  uint64_t offset, size;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));
} // namespace

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* pointer) {
  Lock lock(mutex());
  auto it = block_of(reinterpret_cast<uintptr_t>(pointer));
  if (it == blocks().end() || it->second.kind != Kind::kDevice) return done(cudaErrorInvalidValue);
  Handle handle{getpid(), memory_file(), static_cast<uint64_t>(it->second.offset), it->second.size};
  *out = {};
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t bytes, unsigned) {
  Lock lock(mutex());
  if (auto error = unsafe("cudaIpcOpenMemHandle")) return error;
  Handle handle;
  memcpy(&handle, &bytes, sizeof handle);
  // Not in the process that exported it, which CUDA answers with "invalid device context".
  if (handle.pid == getpid()) return done(cudaErrorDeviceUninitialized);
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return done(cudaErrorInvalidValue);
  const uintptr_t at = take_addresses(handle.size);
  void* got = mmap(reinterpret_cast<void*>(at), (handle.size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_FIXED, file, handle.offset);
  close(file);
  if (got == MAP_FAILED) return done(cudaErrorInvalidValue);
  blocks()[at] = {handle.size, Kind::kImported, 0};
  *out = got;
  return cudaSuccess;
}
// Waits for all work, as cudaFree does: torch closes a handle while copies from it may still wait
// (torch/csrc/CudaIPCTypes.cpp). Decided here.
API cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  run_all();
  Lock lock(mutex());
  auto it = blocks().find(reinterpret_cast<uintptr_t>(pointer));
  if (it == blocks().end() || it->second.kind != Kind::kImported) return done(cudaErrorInvalidValue);
  unmap(it->first, it->second.size);
  blocks().erase(it);
  return cudaSuccess;
}

// An event of another process is complete: whoever exports one runs all its work first. Decided here.
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t) {
  run_all();
  *out = {};
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t) {
  return cudaEventCreateWithFlags(out, cudaEventDisableTiming);
}
