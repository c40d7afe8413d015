// A lane: experts of one engine that the host runs beside an accelerator, and the threads that run them. Knows no accelerator: who
// sends an errand sees to it that `arrived` rises once the errand's input lies in the lane's memory, and waits for `done`.
//
//   program     begin: input is copied, errand queued | residents run                     | end: waits for `done`, output is copied
//   leader                              `arrived`: with its crew it runs the others -> `done`
//
// Errands of a lane follow one another: the next one's input may come once the last one's output is taken, so one desk does for all.
// Between the errands of a step the crew stays awake; when none has come for a while it sleeps.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>

#include "thread_pool.h"
#include "experts.h"
#include "handlers.h"

namespace rex {

constexpr auto kAwake = std::chrono::milliseconds(2);  // a step's errands come sooner than that
constexpr int kHostSpinLimit = 1 << 16;  // some milliseconds: an offer of a core is a call of the kernel, and errands are shorter than many

// All experts of some layers, in the host's memory, which the lane's owner keeps.
struct Store {
  const void *gate_up, *down;
  ffi::DataType dtype;
  int64_t experts, rows, hidden, width;  // experts: of a layer; rows: of all layers
};

struct Flags {
  std::atomic<uint32_t> arrived{0}, done{0};  // the last ticket of which it holds; written by the accelerator, and read by it
};
inline bool reached(uint32_t now, uint32_t ticket) { return static_cast<int32_t>(now - ticket) >= 0; }

// Memory of a lane's errands. `words`: the layer's place, then the ids, then the bits of the weights.
struct Desk {
  std::byte* x = nullptr;
  int32_t* words = nullptr;
  float* out = nullptr;
};

struct Errand {
  uint32_t ticket;
  int64_t tokens, top_k, hidden, store;
  ffi::DataType dtype;  // of x
  Desk desk;
  int64_t x_bytes() const { return tokens * hidden * ffi::ByteWidth(dtype); }
  int64_t words_bytes() const { return (1 + 2 * tokens * top_k) * sizeof(int32_t); }
  int64_t out_bytes() const { return tokens * hidden * sizeof(float); }
};

using Allocate = void* (*)(size_t bytes);  // memory for good: a lane's is not given back before the process ends

class Lane {
 public:
  Lane(std::vector<Store> stores, int64_t threads) : stores_(std::move(stores)), thread_pool_(threads - 1), leader_([this] { lead(); }) {}
  ~Lane() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_.store(true);
    }
    wake_.notify_one();
    leader_.join();
    for (const Errand& errand : errands_) give_up(errand);
    if (flags_ != nullptr) flags_->done.store(last_.ticket, std::memory_order_release);  // a stream may still wait for it
  }

  std::atomic<bool> in_turn{false}, calls_back{false};  // `begin` waits for `done` too; signals by calls of the driver
  std::atomic<int64_t> num_errands{0}, busy_ns{0};      // run so far, and how long the crew took
  std::mutex sending;                                   // held by `begin` and `end` while they enqueue

  // Other arrays for its stores, two each; false while an errand is under way.
  bool restock(const void* const* arrays) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (flags_ != nullptr && !reached(flags_->done.load(std::memory_order_acquire), last_.ticket)) return false;
    for (Store& store : stores_) store.gate_up = *arrays++, store.down = *arrays++;
    return true;
  }

  const Store* store(int64_t index) const { return index >= 0 && index < int64_t(stores_.size()) ? &stores_[index] : nullptr; }
  bool failed() const { return failed_.load(); }
  Flags* flags() const { return flags_; }
  uint32_t last_ticket() const { return last_.ticket; }
  const float* desk_out() const { return last_.desk.out; }

  // The next errand, its desk large enough; not yet queued. Its desk is null where memory is refused: then there is none. Only under
  // `sending`.
  Errand next(int64_t tokens, int64_t top_k, int64_t hidden, ffi::DataType dtype, int64_t store, Allocate allocate) {
    Errand errand{last_.ticket + 1, tokens, top_k, hidden, store, dtype, {}};
    const size_t bytes = padded(errand.x_bytes()) + padded(errand.words_bytes()) + padded(errand.out_bytes());
    if (flags_ == nullptr)
      if (void* memory = allocate(sizeof(Flags)); memory != nullptr) flags_ = new (memory) Flags;
    if (bytes > room_)
      if (void* memory = allocate(bytes); memory != nullptr) desk_ = static_cast<std::byte*>(memory), room_ = bytes;
    if (flags_ == nullptr || bytes > room_) return errand;  // what is in flight keeps the old desk
    std::byte* words = desk_ + padded(errand.x_bytes());
    errand.desk = {desk_, reinterpret_cast<int32_t*>(words), reinterpret_cast<float*>(words + padded(errand.words_bytes()))};
    return last_ = errand;
  }

  void queue(const Errand& errand) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      errands_.push_back(errand);
      num_queued_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_one();
  }

  void wait(uint32_t ticket) const {
    for (int spins = 0; !reached(flags_->done.load(std::memory_order_acquire), ticket);) backoff(spins);
  }

 private:
  static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

  void lead() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return over_.load() || !errands_.empty(); });
        if (over_.load()) return;
      }
      Team team(thread_pool_.size(), [this](std::function<void()> task) { thread_pool_.schedule(std::move(task)); }, kHostSpinLimit);
      for (Errand errand; take(errand);) {
        const Flags& flags = *flags_;
        for (int spins = 0; !reached(flags.arrived.load(std::memory_order_acquire), errand.ticket);) {
          if (over_.load()) return give_up(errand);
          backoff(spins, kHostSpinLimit);
        }
        const auto begin = std::chrono::steady_clock::now();
        if (!run(team, errand)) failed_.store(true), give_up(errand);  // the next errand is refused
        busy_ns.fetch_add(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
        num_errands.fetch_add(1);
        flags_->done.store(errand.ticket, std::memory_order_release);
      }
    }
  }

  // Of an errand that is not run nobody can be told, so it gives no number.
  static void give_up(const Errand& errand) { std::fill_n(errand.desk.out, errand.tokens * errand.hidden, NAN); }

  // The next errand; false when none has come for a while.
  bool take(Errand& errand) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 0; num_queued_.load(std::memory_order_acquire) == 0;) {
      if (over_.load() || std::chrono::steady_clock::now() > until) return false;
      backoff(spins, kHostSpinLimit);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    errand = errands_.front();
    errands_.pop_front();
    num_queued_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

  bool run(Team& team, const Errand& errand) {
    const Store& store = stores_[errand.store];
    const int64_t place = errand.desk.words[0], slots = errand.tokens * errand.top_k;
    const int32_t* ids = errand.desk.words + 1;
    const float* weights = reinterpret_cast<const float*>(ids + slots);
    const ExpertShape shape{errand.tokens, errand.top_k, store.hidden, store.width, store.experts, place * store.experts, true};
    if (place < 0 || shape.first + shape.experts > store.rows) return false;
    if (std::all_of(ids, ids + slots, [](int32_t id) { return id == -1; })) {
      std::fill_n(errand.desk.out, errand.tokens * errand.hidden, 0.0f);
      return true;
    }
    const std::unique_ptr<bool[]> valid(new bool[errand.tokens]);
    std::fill_n(valid.get(), errand.tokens, true);
    bool known = false;
    dispatch_dtype(errand.dtype, [&](auto fed) {
      return dispatch_dtype(store.dtype, [&](auto type) {
        using T = decltype(type);
        const auto* x = reinterpret_cast<const decltype(fed)*>(errand.desk.x);
        const T *gate_up = static_cast<const T*>(store.gate_up), *down = static_cast<const T*>(store.down);
        known = experts(team, shape, x, ids, weights, valid.get(), gate_up, down, errand.desk.out);
        return ffi::Error::Success();
      });
    });
    return known;
  }

  std::vector<Store> stores_;  // the leader reads it behind `mutex_`, by which it took its errand
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Errand> errands_;
  std::atomic<int64_t> num_queued_{0};
  std::atomic<bool> over_{false}, failed_{false};
  Errand last_{};
  size_t room_ = 0;
  std::byte* desk_ = nullptr;
  Flags* flags_ = nullptr;
  ThreadPool thread_pool_;
  std::thread leader_;
};

// Open lanes by number. A number is given again once its lane is closed: programs name it, and so the same engines compile the same.
class Lanes {
 public:
  static Lanes& all() {
    static Lanes lanes;
    return lanes;
  }
  int64_t open(std::vector<Store> stores, int64_t threads) {
    auto lane = std::make_shared<Lane>(std::move(stores), threads);
    std::lock_guard<std::mutex> lock(mutex_);
    size_t number = std::find(open_.begin(), open_.end(), nullptr) - open_.begin();
    if (number == open_.size()) open_.emplace_back();
    open_[number] = std::move(lane);
    return number;
  }
  std::shared_ptr<Lane> at(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return number >= 0 && number < int64_t(open_.size()) ? open_[number] : nullptr;
  }
  void close(int64_t number) {
    std::shared_ptr<Lane> lane = at(number);  // its threads end outside of the lock
    std::lock_guard<std::mutex> lock(mutex_);
    if (lane != nullptr) open_[number] = nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Lane>> open_;
};

}  // namespace rex
