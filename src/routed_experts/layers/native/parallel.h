// Work shared between a kernel's caller and other threads: XLA's own, or those of thread_pool.h.
//
// A team lasts as long as its kernel. Its helpers are scheduled once and stay awake between two loops of the kernel: a stack of
// layers is one kernel of many short loops, and waking a thread costs more than most of them. Items are taken one by one, so
// unequal ones balance. The caller takes part and waits only for items that were begun: a busy pool slows it down but cannot
// block it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace rex {

constexpr int kSpinLimit = 4000;

inline void backoff(int& spins, int spin_limit = kSpinLimit) {
  if (++spins > spin_limit) {
    std::this_thread::yield();
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

class Team {
 public:
  using Schedule = std::function<void(std::function<void()>)>;
  // `spin_limit`: polls of a helper without work before it yields its core at every poll.
  Team(int64_t size, Schedule schedule, int spin_limit = kSpinLimit)
      : size_(std::max<int64_t>(size, 1)), spin_limit_(spin_limit), schedule_(std::move(schedule)), state_(std::make_shared<State>()) {}
  explicit Team(xla::ffi::ThreadPool& pool)
      : Team(pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }) {}
  Team(const Team&) = delete;
  ~Team() { state_->turn.store(kOver, std::memory_order_release); }

  int64_t size() const { return size_; }

  // Run body(item) for every item of 0..items-1.
  template <class Body>
  void each(int64_t items, const Body& body) {
    if (items < 2 || size() < 2) {
      for (int64_t i = 0; i < items; i++) body(i);
      return;
    }
    gather();
    State& s = *state_;
    s.call.store([](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, std::memory_order_release);
    s.body.store(&body, std::memory_order_release);
    s.items.store(items, std::memory_order_release);
    s.done.store(0, std::memory_order_relaxed);
    s.turn.store(++loop_ << kItemBits, std::memory_order_release);
    s.work();
    for (int spins = 0; s.done.load(std::memory_order_acquire) < items;) backoff(spins);
    s.turn.store((loop_ << kItemBits) | kClosed, std::memory_order_release);
  }

 private:
  static constexpr int kItemBits = 32;
  static constexpr uint64_t kClosed = (uint64_t{1} << kItemBits) - 1;
  static constexpr uint64_t kOver = ~uint64_t{0};

  // `turn` packs the loop's number and its next item into one word. The thread that advances it owns the item, and the loop cannot
  // end before that item is done. A loop is closed before the next one is published, so a thread that read parts of two loops fails
  // to advance `turn`.
  struct State {
    std::atomic<uint64_t> turn{kClosed};
    std::atomic<int64_t> items{0}, done{0};
    std::atomic<const void*> body{nullptr};
    std::atomic<void (*)(const void*, int64_t)> call{nullptr};

    // Take items until none is left; false once the team has ended.
    bool work() {
      for (;;) {
        uint64_t now = turn.load(std::memory_order_acquire);
        if (now == kOver) return false;
        const int64_t item = now & kClosed;
        if (item >= items.load(std::memory_order_acquire)) return true;
        const void* what = body.load(std::memory_order_acquire);
        auto run = call.load(std::memory_order_acquire);
        if (!turn.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel)) continue;
        run(what, item);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };

  void gather() {
    if (gathered_) return;
    gathered_ = true;
    for (int64_t i = 1; i < size(); i++)
      schedule_([state = state_, spin_limit = spin_limit_] {
        uint64_t seen = 0;
        for (int spins = 0; state->work();) {
          const uint64_t now = state->turn.load(std::memory_order_relaxed);
          if (now != seen) spins = 0, seen = now;
          backoff(spins, spin_limit);
        }
      });
  }

  int64_t size_;
  int spin_limit_;
  Schedule schedule_;
  std::shared_ptr<State> state_;
  uint64_t loop_ = 0;
  bool gathered_ = false;
};

// The same for rows 0..rows-1 in blocks of at most `most`, enough of them for the whole team: body(begin, end).
template <class Body>
void each_block(Team& team, int64_t rows, int64_t most, const Body& body) {
  const int64_t size = std::clamp<int64_t>(rows / (2 * team.size()), 1, most);
  team.each((rows + size - 1) / size, [&](int64_t b) { body(b * size, std::min(rows, (b + 1) * size)); });
}

}  // namespace rex
