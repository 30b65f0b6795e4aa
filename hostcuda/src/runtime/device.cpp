// The one device: numbers of an H100 (compute capability 9.0), so that torch, Inductor and Triton choose as they do
// there.
#include "device.h"
#include "state.h"

#include <cuda.h>

namespace hostcuda {

// CUDA Programming Guide, "CUDA Environment Variables": an empty CUDA_VISIBLE_DEVICES hides all devices.
int device_count() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  return visible && !*visible ? 0 : 1;
}

namespace {
constexpr int kClockKHz = 1980000, kMemoryClockKHz = 2619000;

cudaDeviceProp make_properties() {
  cudaDeviceProp p = {};
  snprintf(p.name, sizeof p.name, "%s", kName);
  for (int i = 0; i < 16; ++i) p.uuid.bytes[i] = i + 1;
  p.totalGlobalMem = kTotalMemory;
  p.sharedMemPerBlock = 49152;
  p.regsPerBlock = 65536;
  p.warpSize = 32;
  p.memPitch = 2147483647;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.totalConstMem = 65536;
  p.major = 9;
  p.minor = 0;
  p.textureAlignment = 512;
  p.texturePitchAlignment = 32;
  p.multiProcessorCount = 132;
  p.canMapHostMemory = 1;
  p.concurrentKernels = 1;
  p.pciBusID = 1;
  p.asyncEngineCount = 3;
  p.unifiedAddressing = 1;
  p.memoryBusWidth = 5120;
  p.l2CacheSize = 50 << 20;
  p.maxThreadsPerMultiProcessor = 2048;
  p.streamPrioritiesSupported = 1;
  p.globalL1CacheSupported = p.localL1CacheSupported = 1;
  p.sharedMemPerMultiprocessor = 233472;
  p.regsPerMultiprocessor = 65536;
  p.managedMemory = 1;
  p.computePreemptionSupported = 1;
  p.canUseHostPointerForRegisteredMem = 1;
  p.cooperativeLaunch = 1;
  p.sharedMemPerBlockOptin = 232448;
  p.maxBlocksPerMultiProcessor = 32;
  p.reservedSharedMemPerBlock = 1024;
  p.hostRegisterSupported = 1;
  p.memoryPoolsSupported = 1;
  p.ipcEventSupported = 1;
  p.clusterLaunch = 1;
  p.unifiedFunctionPointers = 1;
  return p;
}
const cudaDeviceProp& properties() {
  static const cudaDeviceProp one = make_properties();
  return one;
}
} // namespace

int attribute(int which) {
  auto& p = properties();
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return p.maxThreadsPerBlock;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return p.maxThreadsDim[0];
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return p.maxThreadsDim[1];
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return p.maxThreadsDim[2];
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return p.maxGridSize[0];
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return p.maxGridSize[1];
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return p.maxGridSize[2];
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return p.sharedMemPerBlock;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return p.totalConstMem;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return p.warpSize;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return p.memPitch;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return p.regsPerBlock;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return kClockKHz;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return p.textureAlignment;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP: return 1;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return p.multiProcessorCount;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return p.canMapHostMemory;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return p.concurrentKernels;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return p.pciBusID;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return kMemoryClockKHz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return p.memoryBusWidth;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return p.l2CacheSize;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return p.maxThreadsPerMultiProcessor;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return p.asyncEngineCount;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return p.unifiedAddressing;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return p.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return p.minor;
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return p.streamPrioritiesSupported;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED: return p.globalL1CacheSupported;
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED: return p.localL1CacheSupported;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return p.sharedMemPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return p.regsPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return p.managedMemory;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: return p.computePreemptionSupported;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return p.canUseHostPointerForRegisteredMem;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: return p.cooperativeLaunch;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return p.sharedMemPerBlockOptin;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return p.maxBlocksPerMultiProcessor;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return p.reservedSharedMemPerBlock;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return p.memoryPoolsSupported;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return p.clusterLaunch;
    default: return 0; // not available: multicast, fabric handles, GPUDirect, textures of many kinds
  }
}

} // namespace hostcuda
using namespace hostcuda;

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (device != 0) return done(cudaErrorInvalidDevice);
  *out = properties();
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : done(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : done(cudaErrorInvalidDevice); }
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return done(cudaErrorPeerAccessUnsupported); }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int) {
  snprintf(out, size, "%s", kBusId);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceReset() { return refuse("cudaDeviceReset", cudaErrorNotSupported); }
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1 << 20;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
