// What torch asks of cuBLAS before a product (handle, stream, workspace), and a CUPTI that is not there.
// No versions: found first, it answers references with any version.
#include "hostcuda.h"
#include <cstdio>
#include <cstring>
#define API extern "C" __attribute__((visibility("default")))

namespace {
struct Handle { cudaStream_t stream; void* own; };
enum { kSuccess = 0, kNotInitialized = 1, kAllocFailed = 3, kNotSupported = 15 };
}
// As the real one does, it takes device memory: nothing to do in a capture.
API int cublasCreate_v2(void** handle) {
  auto* h = new Handle{};
  if (cudaMalloc(&h->own, 4096) != cudaSuccess) { delete h; *handle = nullptr; cudaGetLastError(); return kNotInitialized; }
  *handle = h;
  return kSuccess;
}
API int cublasDestroy_v2(void* handle) { delete (Handle*)handle; return kSuccess; }
API int cublasSetStream_v2(void* handle, cudaStream_t stream) { ((Handle*)handle)->stream = stream; return kSuccess; }
API int cublasGetStream_v2(void* handle, cudaStream_t* stream) { *stream = ((Handle*)handle)->stream; return kSuccess; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return kSuccess; }
API int cublasSetMathMode(void*, int) { return kSuccess; }
API int cublasGetMathMode(void*, int* mode) { *mode = 0; return kSuccess; }
API int cublasSetPointerMode_v2(void*, int) { return kSuccess; }
API int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return kSuccess; }
API int cublasSetSmCountTarget(void*, int) { return kSuccess; }

// NCCL with one rank: every collective is a copy.
namespace {
struct UniqueId { char bytes[128]; };
struct Communicator { int ranks; };
size_t size_of(int type) { // ncclDataType_t
  switch (type) { case 0: case 1: case 10: case 11: return 1; case 2: case 3: case 7: return 4; case 6: case 9: return 2; default: return 8; }
}
int copied(const char* name, const void* from, void* to, size_t bytes, cudaStream_t stream) {
  return hostcuda::issue(stream, name, [=] {
    hostcuda::check_range(from, bytes, name);
    hostcuda::check_range(to, bytes, name);
    if (from != to) memmove(to, from, bytes);
  }) == cudaSuccess ? 0 : 1;
}
} // namespace
API int ncclGetVersion(int* v) { *v = 23007; return 0; }
API int ncclGetUniqueId(UniqueId* id) { memset(id, 1, sizeof *id); return 0; }
API int ncclCommInitRankConfig(void** comm, int ranks, UniqueId, int, void*) { if (ranks != 1) return 5; *comm = new Communicator{ranks}; return 0; }
API int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) { return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr); }
API int ncclCommInitRankScalable(void** comm, int ranks, int rank, int, UniqueId*, void*) { return ncclCommInitRankConfig(comm, ranks, {}, rank, nullptr); }
API int ncclCommSplit(void*, int, int, void** comm, void*) { *comm = new Communicator{1}; return 0; }
API int ncclCommCount(void*, int* n) { *n = 1; return 0; }
API int ncclCommUserRank(void*, int* n) { *n = 0; return 0; }
API int ncclCommGetAsyncError(void*, int* e) { *e = 0; return 0; }
API int ncclCommFinalize(void*) { return 0; }
API int ncclCommDestroy(void*) { return 0; }
API int ncclCommAbort(void*) { return 0; }
API int ncclCommRegister(void*, void*, size_t, void** h) { *h = nullptr; return 0; }
API int ncclCommDeregister(void*, void*) { return 0; }
API const char* ncclGetErrorString(int) { return "an error of the fake NCCL"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclGroupStart() { return 0; }
API int ncclGroupEnd() { return 0; }
API int ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) == cudaSuccess ? 0 : 1; }
API int ncclMemFree(void* p) { return cudaFree(p) == cudaSuccess ? 0 : 1; }
API int ncclAllReduce(const void* s, void* r, size_t n, int type, int, void*, cudaStream_t stream) { return copied("ncclAllReduce", s, r, n * size_of(type), stream); }
API int ncclReduce(const void* s, void* r, size_t n, int type, int, int, void*, cudaStream_t stream) { return copied("ncclReduce", s, r, n * size_of(type), stream); }
API int ncclBroadcast(const void* s, void* r, size_t n, int type, int, void*, cudaStream_t stream) { return copied("ncclBroadcast", s, r, n * size_of(type), stream); }
API int ncclBcast(void* b, size_t n, int type, int, void*, cudaStream_t stream) { return copied("ncclBcast", b, b, n * size_of(type), stream); }
API int ncclAllGather(const void* s, void* r, size_t n, int type, void*, cudaStream_t stream) { return copied("ncclAllGather", s, r, n * size_of(type), stream); }
API int ncclReduceScatter(const void* s, void* r, size_t n, int type, int, void*, cudaStream_t stream) { return copied("ncclReduceScatter", s, r, n * size_of(type), stream); }
