// The C++ interface of the fake driver, for the library that computes ATen's operators on the host.
#pragma once
#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace hostcuda {
// Work of a kernel: run now, or recorded as a node where the stream captures. What it throws when it runs now is
// thrown here.
cudaError_t issue(cudaStream_t stream, std::string name, std::function<void()> work);
// What a library does when it needs memory or waits: cudaErrorStreamCaptureUnsupported where a capture forbids it.
cudaError_t unsafe_call(const char* what);
// Throws where the range is device memory that is not allocated.
void check_range(const void* pointer, size_t bytes, const char* what);
bool is_device_pointer(const void* pointer);
} // namespace hostcuda
