// Errors: names, the last one of each thread, and those that stay.
#include "state.h"

namespace hostcuda {

std::atomic<int> sticky{0};

namespace {
thread_local cudaError_t last_error = cudaSuccess;

struct Text {
  int code;
  const char* name;
  const char* text;
};
// The texts are those of libcudart: people look for them.
const Text kTexts[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {301, "cudaErrorFileNotFound", "file not found"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "cudaErrorUnknown", "unknown error"},
};
const Text& text_of(int code) {
  for (auto& one : kTexts)
    if (one.code == code) return one;
  return *(std::end(kTexts) - 1);
}
} // namespace

cudaError_t done(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t sticky_error() { return done(static_cast<cudaError_t>(sticky.load())); }

cudaError_t refuse(const char* call, cudaError_t error) {
  Lock lock(mutex());
  counters().refused++;
  refusals()[std::string(call) + " -> " + text_of(error).name]++;
  TRACE("%s refused: %s", call, text_of(error).name);
  return done(error);
}

void device_fault(const std::exception& error) {
  fprintf(stderr, "hostcuda: device work failed: %s\n", error.what());
  if (!sticky) sticky = cudaErrorLaunchFailure; // unless the work has said what it was
}

} // namespace hostcuda
using namespace hostcuda;

API const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
API const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }
// "Returns the last error ... and resets it": not the sticky ones (Runtime API, cudaGetLastError).
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return sticky ? static_cast<cudaError_t>(sticky.load()) : error;
}
API cudaError_t cudaPeekAtLastError() { return sticky ? static_cast<cudaError_t>(sticky.load()) : last_error; }

// No call of CUDA's: for tests that plant a fault and go on.
API void hostcuda_clear_sticky() {
  sticky = 0;
  last_error = cudaSuccess;
}
