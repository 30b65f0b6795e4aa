// The few functions of NVML that torch's allocator asks: no fabric, no other process. Without them torch calls a null
// pointer where it makes expandable segments (c10/cuda/driver_api.cpp).
enum { kSuccess = 0, kNotSupported = 3, kUnknownDevice = 255 };

int nvmlInit_v2(void) { return kSuccess; }
int nvmlShutdown(void) { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  (void)id;
  *device = (void*)0x1;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) {
  (void)i;
  *device = (void*)0x1;
  return kSuccess;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 1;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, int* type) {
  (void)device, (void)link;
  *type = kUnknownDevice;
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* info) {
  (void)device, (void)link, (void)info;
  return kNotSupported;
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* infos) {
  (void)device, (void)infos;
  *count = 0;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* infos) {
  return nvmlDeviceGetComputeRunningProcesses(device, count, infos);
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
int nvmlDeviceGetGpuFabricInfoV(void* device, void* info) {
  (void)device, (void)info;
  return kNotSupported;
}
