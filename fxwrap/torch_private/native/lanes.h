// Steps that run at the same time, in lanes, on the threads of OpenMP's pool, which are those of torch and Inductor.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#include <sched.h>

#include <atomic>
#include <cfenv>
#include <exception>
#include <mutex>

#include "python_steps.h"

namespace fxwrap {

// For ThreadSanitizer, which does not know OpenMP's barriers: what a thread did before ``tell`` comes before what another
// does after ``hear``.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
inline void tell(void* of) { __tsan_release(of); }
inline void hear(void* of) { __tsan_acquire(of); }
#else
inline void tell(void*) {}
inline void hear(void*) {}
#endif

// Without OpenMP one thread goes along all lanes.
#ifdef _OPENMP
inline size_t thread_number() { return static_cast<size_t>(omp_get_thread_num()); }
inline bool in_parallel() { return omp_in_parallel() != 0; }
#else
inline size_t thread_number() { return 0; }
inline bool in_parallel() { return false; }
#endif

// Steps of one unit in lanes: in a lane one after the other, and beside those of other lanes.
//
//   lane 0     a     c  d     f        d waits for b
//   lane 1        b        e           f waits for e
//
// A lane belongs to nobody. A thread takes one that is free and goes along it; where it has to wait for another lane
// that is free, it goes along that one first, as far as it needs. So one thread alone can do all of the work, and a
// thread that comes late, on a busy machine, holds nobody up.
//
// It cannot hang: the steps have one order in which each waits only for earlier ones (`place`), so of all steps that
// threads wait at, the first does not wait for another.
class LanesStep : public Step {
 public:
  using Wait = std::pair<size_t, size_t>;  // (a lane, how many of its members have to have ended)
  using Waits = std::vector<std::vector<Wait>>;

  // members: in the order in which one thread runs them
  // lanes, waits, lines: of each; its line in the listing
  LanesStep(const std::vector<std::vector<MadeStep*>>& members, const std::vector<size_t>& lanes, const Waits& waits,
            std::vector<int64_t> lines)
      : lines_(std::move(lines)) {
    for (const auto& member : members)
      for (const auto* made : member)
        if (made->step->lock() == Lock::Needed) throw NotNative();
    const auto count = lanes.empty() ? 0 : *std::max_element(lanes.begin(), lanes.end()) + 1;
    for (size_t lane = 0; lane < count; ++lane) lanes_.push_back(std::make_unique<Lane>());
    for (size_t place = 0; place < members.size(); ++place) {
      auto& lane = *lanes_.at(lanes.at(place));
      order_.emplace_back(lanes[place], lane.members.size());
      lane.members.push_back({place, {}, waits.at(place)});
      for (auto* made : members[place]) lane.members.back().steps.push_back(std::move(made->step));
    }
  }

  Lock lock() const override { return Lock::InTheWay; }
  int64_t failed_line(int64_t) const override { return failed_ < lines_.size() ? lines_[failed_] : lines_.front(); }

  void join(Shared& unit) override {
    unit_ = &unit;
    for_each([&](Step& step) { step.join(unit); });
  }
  int traverse(visitproc visit, void* arg) const override {
    for (const auto& lane : lanes_)
      for (const auto& member : lane->members)
        for (const auto& step : member.steps)
          if (auto stop = step->traverse(visit, arg)) return stop;
    return 0;
  }

  void run(Slots& slots) override {
    failed_ = lines_.size();
    const auto threads = std::min(lanes_.size(), static_cast<size_t>(at::get_num_threads()));
    if (threads < 2 || !may_run_beside(at::get_num_threads())) return one_after_the_other(slots);
    for (const auto& lane : lanes_) lane->ended.store(0, std::memory_order_relaxed);
    stopped_.store(false, std::memory_order_relaxed);
    const at::ThreadLocalState state;
    std::fenv_t rounding;  // and whether denormal numbers are flushed
    std::fegetenv(&rounding);
    tell(this);
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      const auto thread = thread_number();
      if (thread == 0) {
        take_part(slots, 0);
      } else {
        hear(this);
        std::fenv_t own;
        std::fegetenv(&own);
        std::fesetenv(&rounding);
        {
          const at::ThreadLocalStateGuard as_caller(state);
          take_part(slots, thread);
        }
        std::fesetenv(&own);
        tell(this);
      }
    }
    hear(this);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  struct Member {
    size_t place;
    std::vector<std::unique_ptr<Step>> steps;
    std::vector<Wait> waits;
  };
  struct alignas(64) Lane {  // a cache line of its own for what threads write
    std::atomic<size_t> ended{0};
    std::atomic<bool> taken{false};
    alignas(64) std::vector<Member> members;
  };

  template <typename Function>
  void for_each(const Function& function) {
    for (auto [lane, index] : order_)
      for (const auto& step : lanes_[lane]->members[index].steps) function(*step);
  }

  // Whether threads may share the work of this call.
  bool may_run_beside(int threads) {
    if (beside_ == Beside::NotKnown || asked_with_ != threads) {
      beside_ = Beside::Yes;
      asked_with_ = threads;
      for_each([&](const Step& step) { beside_ = std::min(beside_, step.beside_others()); });
    }
    // OpenMP waits forever, in a forked child, for threads that are not there. A profile shows one thread's work, and
    // modes of Python's see the calls of one thread.
    return beside_ == Beside::Yes && !is_forked && !in_parallel() && !unit_->profiled &&
           !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value() &&
           !c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python);
  }

  void one_after_the_other(Slots& slots) {
    for (size_t place = 0; place < order_.size(); ++place) {
      failed_ = place;
      const auto [lane, index] = order_[place];
      for (const auto& step : lanes_[lane]->members[index].steps) {
        if (C10_LIKELY(!unit_->profiled))
          step->run(slots);
        else
          in_range(*step, [&] { step->run(slots); });
      }
    }
  }

  // Goes along lanes, the thread's own first, until all of them have ended.
  void take_part(Slots& slots, size_t thread) {
    for (size_t spins = 0;; ++spins) {
      bool all = true;
      for (size_t i = 0; i < lanes_.size(); ++i) {
        auto& lane = *lanes_[(thread + i) % lanes_.size()];
        if (has_ended(lane, lane.members.size())) continue;
        all = false;
        if (go_along(slots, lane, lane.members.size())) spins = 0;
      }
      if (all || stopped_.load(std::memory_order_relaxed)) return;
      pause(spins);
    }
  }

  static bool has_ended(const Lane& lane, size_t count) { return lane.ended.load(std::memory_order_acquire) >= count; }

  // Runs members of a lane until so many have ended; false if another thread has the lane.
  bool go_along(Slots& slots, Lane& lane, size_t count) {
    if (lane.taken.load(std::memory_order_relaxed) || lane.taken.exchange(true, std::memory_order_acquire)) return false;
    for (auto at = lane.ended.load(std::memory_order_relaxed); at < count; ++at) {
      auto& member = lane.members[at];
      for (const auto& [other, ended] : member.waits)
        for (size_t spins = 0; !has_ended(*lanes_[other], ended) && !stopped_.load(std::memory_order_relaxed);)
          if (!go_along(slots, *lanes_[other], ended)) pause(spins++);
      if (stopped_.load(std::memory_order_relaxed)) break;
      try {
        for (const auto& step : member.steps) step->run(slots);
      } catch (...) {
        stop(member.place);
        break;
      }
      lane.ended.store(at + 1, std::memory_order_release);
    }
    lane.taken.store(false, std::memory_order_release);
    return true;
  }

  // Ends the call, with the error of the first step that raised.
  void stop(size_t place) {
    std::lock_guard lock(mutex_);
    if (place < failed_) {
      failed_ = place;
      error_ = std::current_exception();
    }
    stopped_.store(true, std::memory_order_release);
  }

  // A thread that waits for long lets others have its core.
  static void pause(size_t spins) {
    if (spins % kSpins == kSpins - 1) {
      sched_yield();
      return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  static constexpr size_t kSpins = 1 << 10;

  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::pair<size_t, size_t>> order_;  // by place: the lane, and the position in it
  std::vector<int64_t> lines_;
  const Shared* unit_ = nullptr;
  Beside beside_ = Beside::NotKnown;
  int asked_with_ = 0;  // threads
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
  size_t failed_ = 0;
};

}  // namespace fxwrap
