// The C++ interface of the device, for the library that computes ATen's operators on the host and for the stand-ins
// of cuBLAS and NCCL.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace hostcuda {

// Work of a kernel: run now, left for later (HOSTCUDA_LAZY), or recorded as a node where the stream captures. What it
// throws when it runs now is thrown here.
cudaError_t issue(cudaStream_t stream, std::string name, std::function<void()> work);

// What a library calls before it takes memory or waits: cudaErrorStreamCaptureUnsupported where a capture forbids it.
cudaError_t unsafe_call(const char* what);

// Throws where the range is device memory that is not allocated.
void check_range(const void* pointer, size_t bytes, const char* what);

bool is_device_pointer(const void* pointer);

} // namespace hostcuda
