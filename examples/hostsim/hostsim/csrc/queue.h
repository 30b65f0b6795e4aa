#pragma once

#include "work.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>

namespace backend {

// What a stream runs, in order. In asynchronous mode a thread of its own does it; otherwise whoever pushes does.
// Queues are never destroyed: their threads may outlive everything else.
class Queue {
 public:
  void push(Work work);
  // Until everything pushed so far has run. Raises what failed since the last wait.
  void wait();
  // The same, but leaves a failure for the next wait; no waiting for itself either.
  void drain();
  // Raises what failed since the last wait, without waiting.
  void raise_failure();
  bool idle();

 private:
  void serve();
  void wait_until_done(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> items_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  bool served_ = false;
  std::exception_ptr failure_;
};

bool asynchronous();
// The caller has waited for all queues.
void set_asynchronous_mode(bool value);

// The process ends: drop what is queued, and run what comes after at once.
void stop_queues();
bool queues_stopped();

} // namespace backend
