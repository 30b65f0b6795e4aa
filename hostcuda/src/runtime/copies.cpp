// Copies and memsets. Runtime API, "API synchronization behavior", says which of them wait.
#include "memory.h"
#include "streams.h"

#include <algorithm>
#include <unordered_map>

namespace hostcuda {

namespace {
// The calls without a stream belong to the legacy stream and wait for it.
cudaError_t synchronous(const char* call) {
  {
    Lock lock(mutex());
    if (auto error = sticky_error()) return error;
    if (auto error = unsafe(call)) return error;
    if (auto error = implicit(legacy_stream(), call)) return error;
  }
  run_legacy();
  return sticky_error();
}
bool captures(cudaStream_t handle) {
  Lock lock(mutex());
  Stream* stream = resolve(handle);
  return known(stream) && stream->capture;
}
// With HOSTCUDA_COMPUTE=0 what only moves bytes of the device does nothing.
bool left_out(const void* to, const void* from) {
  return !kComputes && is_device_pointer(to) && is_device_pointer(from);
}

struct Variable {
  size_t size = 0;
  void* memory = nullptr;
};
std::unordered_map<const void*, Variable>& variables() {
  static auto* all = new std::unordered_map<const void*, Variable>;
  return *all;
}
void* memory_of(const void* host) {
  Lock lock(mutex());
  auto& variable = variables()[host];
  if (!variable.memory) device_malloc(&variable.memory, std::max<size_t>(variable.size, 1024));
  return variable.memory;
}
} // namespace

void register_variable(const void* host, size_t size) {
  Lock lock(mutex());
  variables()[host] = {size, nullptr};
}

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (auto error = synchronous("cudaMemcpy")) return error;
  return guarded([&] {
    Executing executing;
    if (!left_out(to, from)) copy_bytes(to, from, bytes);
    return cudaSuccess;
  });
}

// From pageable memory: the bytes are read before the call returns ("staged"); to pageable memory: the call returns
// when they have arrived ("API synchronization behavior", "Asynchronous": it may be so, decided here). In a capture
// nothing is staged: the node has the address, and whoever gives up that memory gets wrong bytes with a replay.
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  auto issued = [&](const char* name, std::function<void()> run) {
    return guarded([&] { return submit(handle, cudaGraphNodeTypeMemcpy, name, std::move(run), {to, from}); });
  };
  if (left_out(to, from)) return issued("cudaMemcpyAsync", nullptr);
  if (kLazy && !captures(handle)) {
    if (pageable(from)) {
      auto* begin = static_cast<const char*>(from);
      auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
      return issued("cudaMemcpyAsync (staged)", [=] { copy_bytes(to, staged->data(), bytes); });
    }
    if (pageable(to)) {
      auto error = issued("cudaMemcpyAsync (waits)", [=] { copy_bytes(to, from, bytes); });
      if (error == cudaSuccess) run_stream(resolve(handle)->queue);
      return error ? error : sticky_error();
    }
  }
  return issued("cudaMemcpyAsync", [=] { copy_bytes(to, from, bytes); });
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  auto run = [=] {
    for (size_t i = 0; i < height; ++i)
      copy_bytes(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  };
  return guarded([&] {
    if (left_out(to, from)) return submit(stream, cudaGraphNodeTypeMemcpy, "cudaMemcpy2DAsync", nullptr, {to, from});
    return submit(stream, cudaGraphNodeTypeMemcpy, "cudaMemcpy2DAsync", run, {to, from});
  });
}

API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (auto error = synchronous("cudaMemset")) return error;
  return guarded([&] {
    Executing executing;
    if (kComputes) set_bytes(to, value, bytes);
    return cudaSuccess;
  });
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  std::function<void()> run;
  if (kComputes) run = [=] { set_bytes(to, value, bytes); };
  return guarded([&] { return submit(stream, cudaGraphNodeTypeMemset, "cudaMemsetAsync", run, {to}); });
}

API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  *out = memory_of(symbol);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                                   cudaMemcpyKind kind) {
  return cudaMemcpy(static_cast<char*>(memory_of(symbol)) + offset, from, bytes, kind);
}
