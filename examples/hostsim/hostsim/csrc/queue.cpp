#include "queue.h"

#include "devices.h"
#include "name.h"
#include "python.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <thread>
#include <utility>

namespace backend {

namespace {

std::atomic<bool> stopped{false};

// The queue that this thread serves.
thread_local Queue* served_here = nullptr;

std::atomic<bool>& mode() {
  static std::atomic<bool> value{environment_flag(DEVICE_ENVIRONMENT("ASYNC"))};
  return value;
}

} // namespace

bool asynchronous() {
  return mode().load(std::memory_order_relaxed);
}

void set_asynchronous_mode(bool value) {
  mode() = value;
}

void stop_queues() {
  stopped = true;
  mode() = false;
}

bool queues_stopped() {
  return stopped.load(std::memory_order_relaxed);
}

void Queue::push(Work work) {
  if (!asynchronous()) {
    if (!queues_stopped() && !idle()) {
      drain();
    }
    work.run();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(work));
    ++pushed_;
    if (!served_) {
      served_ = true;
      std::thread([this] { serve(); }).detach();
    }
  }
  changed_.notify_all();
}

void Queue::serve() {
  served_here = this;
  while (true) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !items_.empty(); });
      work = std::move(items_.front());
      items_.pop_front();
    }
    std::exception_ptr failure;
    if (work.control || !queues_stopped()) {
      try {
        work.run();
      } catch (...) {
        // As text: the exception may own Python objects, which must not outlive the interpreter's lock.
        const std::string message = describe_current_exception();
        failure = std::make_exception_ptr(c10::Error(
            {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
            "'" + work.name + "' failed in a stream's queue: " + message));
      }
    }
    // What the work owns is released before it counts as done.
    work = Work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      if (failure && !failure_) {
        failure_ = failure;
      }
    }
    changed_.notify_all();
  }
}

void Queue::wait_until_done(std::unique_lock<std::mutex>& lock) {
  if (served_here == this) {
    return; // The work that is asking would wait for itself.
  }
  const uint64_t target = pushed_;
  changed_.wait(lock, [&] { return done_ >= target; });
}

void Queue::wait() {
  drain();
  raise_failure();
}

void Queue::raise_failure() {
  std::exception_ptr failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void Queue::drain() {
  ReleaseGil release;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until_done(lock);
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

} // namespace backend
