// NCCL with one rank: every collective is a copy. More ranks are refused.
#include "../hostcuda.h"

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {
enum Result { kSuccess = 0, kUnhandledCudaError = 1, kInvalidArgument = 4, kInvalidUsage = 5 }; // ncclResult_t
struct UniqueId {
  char bytes[128];
};
struct Communicator {};

size_t size_of(int type) { // ncclDataType_t
  switch (type) {
    case 0: case 1: case 10: case 11: return 1; // int8, uint8, float8
    case 6: case 9: return 2;                   // float16, bfloat16
    case 2: case 3: case 7: return 4;           // int32, uint32, float32
    default: return 8;                          // int64, uint64, float64
  }
}
int copied(const char* name, const void* from, void* to, size_t count, int type, cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  auto run = [=] {
    hostcuda::check_range(from, bytes, name);
    hostcuda::check_range(to, bytes, name);
    if (from != to) memmove(to, from, bytes);
  };
  return hostcuda::issue(stream, name, run) == cudaSuccess ? kSuccess : kUnhandledCudaError;
}
} // namespace

API int ncclGetVersion(int* version) {
  *version = 23007;
  return kSuccess;
}
API int ncclGetUniqueId(UniqueId* id) {
  memset(id, 1, sizeof *id);
  return kSuccess;
}
API int ncclCommInitRankConfig(void** out, int ranks, UniqueId, int, void*) {
  if (ranks != 1) return kInvalidUsage;
  *out = new Communicator;
  return kSuccess;
}
API int ncclCommInitRank(void** out, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}
API int ncclCommInitRankScalable(void** out, int ranks, int rank, int, UniqueId*, void*) {
  return ncclCommInitRankConfig(out, ranks, {}, rank, nullptr);
}
API int ncclCommSplit(void*, int, int, void** out, void*) {
  *out = new Communicator;
  return kSuccess;
}
API int ncclCommCount(void*, int* count) {
  *count = 1;
  return kSuccess;
}
API int ncclCommUserRank(void*, int* rank) {
  *rank = 0;
  return kSuccess;
}
API int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return kSuccess;
}
API int ncclCommFinalize(void*) { return kSuccess; }
API int ncclCommDestroy(void* communicator) {
  delete static_cast<Communicator*>(communicator);
  return kSuccess;
}
API int ncclCommAbort(void* communicator) { return ncclCommDestroy(communicator); }
API int ncclCommRegister(void*, void*, size_t, void** handle) {
  *handle = nullptr;
  return kSuccess;
}
API int ncclCommDeregister(void*, void*) { return kSuccess; }
API const char* ncclGetErrorString(int code) {
  return code == kInvalidUsage ? "hostcuda's NCCL has one rank only" : "an error of hostcuda's NCCL";
}
API const char* ncclGetLastError(void*) { return ""; }
API int ncclGroupStart() { return kSuccess; }
API int ncclGroupEnd() { return kSuccess; }
API int ncclMemAlloc(void** out, size_t bytes) {
  return cudaMalloc(out, bytes) == cudaSuccess ? kSuccess : kUnhandledCudaError;
}
API int ncclMemFree(void* pointer) { return cudaFree(pointer) == cudaSuccess ? kSuccess : kUnhandledCudaError; }

API int ncclAllReduce(const void* from, void* to, size_t n, int type, int, void*, cudaStream_t stream) {
  return copied("ncclAllReduce", from, to, n, type, stream);
}
API int ncclReduce(const void* from, void* to, size_t n, int type, int, int, void*, cudaStream_t stream) {
  return copied("ncclReduce", from, to, n, type, stream);
}
API int ncclBroadcast(const void* from, void* to, size_t n, int type, int, void*, cudaStream_t stream) {
  return copied("ncclBroadcast", from, to, n, type, stream);
}
API int ncclBcast(void* buffer, size_t n, int type, int, void*, cudaStream_t stream) {
  return copied("ncclBcast", buffer, buffer, n, type, stream);
}
API int ncclAllGather(const void* from, void* to, size_t n, int type, void*, cudaStream_t stream) {
  return copied("ncclAllGather", from, to, n, type, stream);
}
API int ncclReduceScatter(const void* from, void* to, size_t n, int type, int, void*, cudaStream_t stream) {
  return copied("ncclReduceScatter", from, to, n, type, stream);
}
