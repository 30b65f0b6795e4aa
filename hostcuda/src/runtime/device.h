// What the device says of itself.
#pragma once
#include <cstdio>
#include <cstring>

namespace hostcuda {

constexpr int kVersion = 13000; // of CUDA
constexpr const char* kName = "Host-memory CUDA device (no GPU)";
constexpr const char* kBusId = "0000:01:00.0";
int device_count();
int attribute(int which); // a CUdevice_attribute or cudaDeviceAttr: they have the same numbers

} // namespace hostcuda
