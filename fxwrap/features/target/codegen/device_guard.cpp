// A build of torch without a device has no guard for it: operators that switch devices raise there, and abort the
// process where nobody catches. This one does nothing, as that of a CUDA build does where there is no GPU.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(DEVICE, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::DEVICE>)
