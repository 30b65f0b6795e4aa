#include "copies.h"

#include "aliases.h"
#include "capture.h"
#include "devices.h"
#include "events.h"
#include "fallback.h"
#include "faults.h"
#include "host_allocator.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace backend {

namespace {

bool on_device(const at::Tensor& tensor) {
  return tensor.device().type() == kDevice;
}

// `kept` is what must live until the copy has run.
Work copy_work(
    std::string name,
    const at::Tensor& source,
    const at::Tensor& destination,
    std::shared_ptr<void> kept) {
  Aliases aliases(c10::DeviceType::CPU);
  at::Tensor from = aliases.of(source);
  at::Tensor to = aliases.of(destination);
  if (planted(Fault::kStorageOffsetDropped)) {
    from.unsafeGetTensorImpl()->set_storage_offset(0);
  }
  std::vector<MemoryRange> memory{range_of(from, false), range_of(to, true)};
  return {
      std::move(name),
      [from, to, kept = std::move(kept)] {
        KernelGuard guard;
        to.copy_(from);
      },
      std::move(memory)};
}

void copy_within_device(const at::Tensor& source, const at::Tensor& destination) {
  const c10::Stream from = current_stream(source.device().index());
  const c10::Stream to = current_stream(destination.device().index());
  order_streams(from, to);
  issue(to, copy_work("copy", source, destination, nullptr));
  order_streams(to, from);
}

// Whether a copy is one of bytes.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.device() == b.device() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() &&
      a.is_neg() == b.is_neg();
}

void copy_from_or_to_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const bool to_device = on_device(destination);
  const at::Tensor& host = to_device ? source : destination;
  const c10::Stream stream = current_stream((to_device ? destination : source).device().index());
  const std::string name = to_device ? "copy from the host" : "copy to the host";
  std::shared_ptr<void> pinned = keep_pinned(host.storage().data());
  if (non_blocking && pinned) {
    Work work = copy_work(name, source, destination, std::move(pinned));
    if (planted(Fault::kNonBlockingCopyTooLate) && !capture_of(stream)) {
      const c10::Stream late = stream_from_pool(stream.device_index());
      delay(late, 0.3);
      issue(late, std::move(work));
      return;
    }
    issue(stream, std::move(work));
    return;
  }
  const std::string kind = pinned ? "a blocking " : "a pageable ";
  if (!pinned) {
    check_not_captured(HostWait::kPageableCopy, kind + name, stream);
  }
  check_host_may_wait(HostWait::kPageableCopy, kind + name, stream);
  issue(stream, copy_work(name, source, destination, nullptr));
  queue_of(stream).wait();
}

} // namespace

at::Tensor copy_between(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (on_device(source) && on_device(destination)) {
    copy_within_device(source, destination);
  } else {
    const at::Tensor& host = on_device(source) ? destination : source;
    TORCH_CHECK(host.device().is_cpu(), "cannot copy between ", source.device(), " and ", destination.device());
    copy_from_or_to_host(source, destination, non_blocking);
  }
  return destination;
}

void copy_lists(at::TensorList destinations, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(destinations.size() == sources.size(), "lists of ", destinations.size(), " and ", sources.size());
  std::vector<MemoryRange> memory;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (same_layout(sources[i], destinations[i]) && destinations[i].device() == destinations[0].device()) {
      memory.push_back(range_of(sources[i], false));
      memory.push_back(range_of(destinations[i], true));
    }
  }
  if (memory.size() != 2 * sources.size() || memory.empty()) {
    for (size_t i = 0; i < sources.size(); ++i) {
      at::Tensor destination = destinations[i];
      destination.copy_(sources[i], non_blocking);
    }
    return;
  }
  auto run = [memory] {
    for (size_t i = 0; i < memory.size(); i += 2) {
      std::memmove(memory[i + 1].data, memory[i].data, memory[i].bytes);
    }
  };
  issue(current_stream(destinations[0].device().index()), {"copy of lists", std::move(run), std::move(memory)});
}

} // namespace backend
