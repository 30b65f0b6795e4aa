#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <memory>

namespace backend {

at::HostAllocator* host_allocator();

bool is_pinned(const void* address);

// Keeps the pinned block that the address lies in from being reused, also when its tensor has been freed: for copies
// which read or write it later. Null where the address is not pinned.
std::shared_ptr<void> keep_pinned(const void* address);

} // namespace backend
