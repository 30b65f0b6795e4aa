#pragma once

#include "devices.h"
#include "queue.h"

#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace backend {

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
// Returns the one before.
c10::Stream exchange_current_stream(const c10::Stream& stream);
// In turn, one of a fixed number: streams have no owner, so that they could not be given back.
c10::Stream stream_from_pool(c10::DeviceIndex device);
bool is_default_stream(const c10::Stream& stream);
std::string stream_name(const c10::Stream& stream);

Queue& queue_of(const c10::Stream& stream);
// Those of a device that have ever been handed out.
std::vector<c10::Stream> streams_of(c10::DeviceIndex device);
bool device_idle(c10::DeviceIndex device);
// Waits for all queues of a device, whatever is being captured, and leaves failures where they are.
void drain_device(c10::DeviceIndex device);

// Runs, queues or records the work, as the stream's state asks for. The one way for work to reach the device.
void issue(const c10::Stream& stream, Work work);

// What the host may ask for. While a graph is captured these are refused.
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(c10::DeviceIndex device);
bool query_stream(const c10::Stream& stream);

void set_asynchronous(bool value);
void delay(const c10::Stream& stream, double seconds);
void shut_down();

} // namespace backend
