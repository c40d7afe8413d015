// The queue of an engine's host experts, and the threads that run its jobs beside an accelerator.
//
//   program   submit: inputs are copied, job queued | device experts run               | wait: for `done`, then outputs are copied
//   leader                  inputs `arrived`: it runs the job with its thread pool -> `done`
//
// A job runs some experts of a layer, or copies their weights to where the accelerator fetches them. Jobs run in the order of submission.
// Up to kStagingBuffers of them may be outstanding: submitted, and not yet waited for. The submitter raises `arrived` once the inputs
// are in the staging buffer. Between the jobs of a step the threads stay awake; without a job for a while they sleep.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "experts.h"
#include "handlers.h"
#include "thread_pool.h"

namespace rex {

constexpr auto kAwake = std::chrono::milliseconds(2);  // a step's jobs come sooner than that
constexpr int kPoolSpinLimit = 1 << 16;  // some milliseconds: yielding a core is a system call, and a job is shorter than many of those
constexpr int kStagingBuffers = 3;  // at once: a layer's job, its deferred job, and the deferred job of the layer before

// All experts of some layers, in the host's memory, which the queue's owner keeps alive.
struct Store {
  const void *gate_up, *down;
  ffi::DataType dtype;
  int64_t experts, rows, hidden, width;  // experts: of a layer; rows: of all layers
  int64_t gate_up_bytes() const { return 2 * hidden * width * ffi::ByteWidth(dtype); }  // of one expert
  int64_t down_bytes() const { return hidden * width * ffi::ByteWidth(dtype); }
};

struct Flags {
  std::atomic<uint32_t> arrived{0}, done{0};  // the last ticket that reached this state; the accelerator writes one and reads the other
};
inline bool reached(uint32_t now, uint32_t ticket) { return static_cast<int32_t>(now - ticket) >= 0; }

// What a job computes: the weighted sums of a layer's experts, the same for experts that the next MoE layer adds, or copies of weights.
enum class JobKind : int64_t { kExperts = 0, kDeferredExperts = 1, kWeights = 2 };

struct Job {
  JobKind kind;
  int64_t count, top_k, hidden, store;  // count: tokens, or experts whose weights are copied
  ffi::DataType dtype;                  // of x
  int64_t out_bytes;
  uint32_t ticket = 0;
  bool outstanding = false;
  // Staging buffer. `words`: the layer's index in its store, then the ids, then the bits of the weights.
  std::byte* x = nullptr;
  int32_t* words = nullptr;
  std::byte* out = nullptr;

  bool copies_weights() const { return kind == JobKind::kWeights; }
  int64_t x_bytes() const { return copies_weights() ? 0 : count * hidden * ffi::ByteWidth(dtype); }
  int64_t num_words() const { return copies_weights() ? 1 + count : 1 + 2 * count * top_k; }
  int64_t words_bytes() const { return num_words() * sizeof(int32_t); }
  int64_t bytes() const { return padded(x_bytes()) + padded(words_bytes()) + padded(out_bytes); }
  static int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

using Allocate = void* (*)(size_t bytes);  // staging memory is kept until the process ends

class HostExpertQueue {
 public:
  HostExpertQueue(std::vector<Store> stores, int64_t threads)
      : stores_(std::move(stores)), pool_(threads - 1), leader_([this] { lead(); }) {}
  ~HostExpertQueue() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_.store(true);
    }
    wake_.notify_one();
    leader_.join();
    for (const Job& job : jobs_) fill_nan(job);
    if (flags_ != nullptr) flags_->done.store(last_ticket_, std::memory_order_release);  // a stream may still wait for it
  }

  std::atomic<bool> serial{false}, uses_callbacks{false};  // submit waits for `done` too; signals are callbacks of the driver
  std::atomic<int64_t> num_jobs{0}, busy_ns{0};            // jobs run so far, and how long they took
  std::mutex submitting;                                   // held by handlers while they enqueue

  // Replace the arrays of all stores, two each; false while a job is under way.
  bool swap_weights(const void* const* arrays) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (flags_ != nullptr && !reached(flags_->done.load(std::memory_order_acquire), last_ticket_)) return false;
    for (Store& store : stores_) store.gate_up = *arrays++, store.down = *arrays++;
    return true;
  }

  const Store* store(int64_t index) const { return index >= 0 && index < int64_t(stores_.size()) ? &stores_[index] : nullptr; }
  bool failed() const { return failed_.load(); }
  Flags* flags() const { return flags_; }

  // Whether the next job would need the staging buffer of one that is outstanding. Hold `submitting`.
  bool is_full() const { return buffers_[(last_ticket_ + 1) % kStagingBuffers].job.outstanding; }

  // Give a job a ticket and a staging buffer; false where memory is refused. Hold `submitting`.
  bool prepare(Job& job, Allocate allocate) {
    if (flags_ == nullptr)
      if (void* memory = allocate(sizeof(Flags)); memory != nullptr) flags_ = new (memory) Flags;
    Buffer& buffer = buffers_[(last_ticket_ + 1) % kStagingBuffers];
    if (flags_ == nullptr) return false;
    if (size_t(job.bytes()) > buffer.bytes) {  // jobs that the accelerator has yet to reach keep the old memory
      void* memory = allocate(job.bytes());
      if (memory == nullptr) return false;
      buffer.memory = static_cast<std::byte*>(memory), buffer.bytes = job.bytes();
    }
    job.x = buffer.memory;
    job.words = reinterpret_cast<int32_t*>(job.x + Job::padded(job.x_bytes()));
    job.out = reinterpret_cast<std::byte*>(job.words) + Job::padded(job.words_bytes());
    job.ticket = ++last_ticket_, job.outstanding = true;
    buffer.job = job;
    return true;
  }

  void push(const Job& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(job);
      num_queued_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_one();
  }

  // Remove the oldest outstanding job of a kind; its ticket is 0 where there is none. Hold `submitting`.
  Job take_outstanding(JobKind kind) {
    Job* oldest = nullptr;
    for (Buffer& buffer : buffers_)
      if (buffer.job.outstanding && buffer.job.kind == kind && (oldest == nullptr || reached(oldest->ticket, buffer.job.ticket)))
        oldest = &buffer.job;
    if (oldest == nullptr) return Job{};
    oldest->outstanding = false;
    return *oldest;
  }

  void wait(uint32_t ticket) const {
    for (int spins = 0; !reached(flags_->done.load(std::memory_order_acquire), ticket);) backoff(spins);
  }

 private:
  struct Buffer {
    std::byte* memory = nullptr;
    size_t bytes = 0;
    Job job{};  // the last job of this buffer
  };

  void lead() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stopped_.load() || !jobs_.empty(); });
        if (stopped_.load()) return;
      }
      Team team(pool_.size(), [this](std::function<void()> task) { pool_.schedule(std::move(task)); }, kPoolSpinLimit);
      for (Job job; pop(job);) {
        const Flags& flags = *flags_;
        for (int spins = 0; !reached(flags.arrived.load(std::memory_order_acquire), job.ticket);) {
          if (stopped_.load()) return fill_nan(job);
          backoff(spins, kPoolSpinLimit);
        }
        const auto begin = std::chrono::steady_clock::now();
        if (!(job.copies_weights() ? copy_weights(team, job) : run_experts(team, job))) failed_.store(true), fill_nan(job);
        busy_ns.fetch_add(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
        num_jobs.fetch_add(1);
        flags_->done.store(job.ticket, std::memory_order_release);
      }
    }
  }

  // A job that does not run cannot report an error to its program, so its outputs are no numbers: all bits set is NaN in every dtype.
  static void fill_nan(const Job& job) { std::memset(job.out, 0xff, job.out_bytes); }

  // The next job; false after some time without one.
  bool pop(Job& job) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 0; num_queued_.load(std::memory_order_acquire) == 0;) {
      if (stopped_.load() || std::chrono::steady_clock::now() > until) return false;
      backoff(spins, kPoolSpinLimit);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    job = jobs_.front();
    jobs_.pop_front();
    num_queued_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

  static bool has_layer(const Store& store, int64_t layer) { return layer >= 0 && (layer + 1) * store.experts <= store.rows; }

  bool run_experts(Team& team, const Job& job) {
    const Store& store = stores_[job.store];
    const int64_t layer = job.words[0], slots = job.count * job.top_k;
    const int32_t* ids = job.words + 1;
    const float* weights = reinterpret_cast<const float*>(ids + slots);
    float* out = reinterpret_cast<float*>(job.out);
    if (!has_layer(store, layer)) return false;
    if (std::all_of(ids, ids + slots, [](int32_t id) { return id == -1; })) {
      std::fill_n(out, job.count * job.hidden, 0.0f);
      return true;
    }
    const ExpertShape shape{job.count, job.top_k, store.hidden, store.width, store.experts, layer * store.experts, true};
    const std::unique_ptr<bool[]> valid(new bool[job.count]);
    std::fill_n(valid.get(), job.count, true);
    bool known = false;
    dispatch_dtype(job.dtype, [&](auto from) {
      return dispatch_dtype(store.dtype, [&](auto type) {
        using T = decltype(type);
        const auto* x = reinterpret_cast<const decltype(from)*>(job.x);
        const T *gate_up = static_cast<const T*>(store.gate_up), *down = static_cast<const T*>(store.down);
        known = experts(team, shape, x, ids, weights, valid.get(), gate_up, down, out, ExpertBiases<T>{});
        return ffi::Error::Success();
      });
    });
    return known;
  }

  // The gate_up matrices of the job's experts, then their down matrices; 0 for id -1.
  bool copy_weights(Team& team, const Job& job) {
    const Store& store = stores_[job.store];
    const int64_t layer = job.words[0];
    const int32_t* ids = job.words + 1;
    if (!has_layer(store, layer)) return false;
    if (std::any_of(ids, ids + job.count, [&](int32_t id) { return id < -1 || id >= store.experts; })) return false;
    team.each(2 * job.count, [&](int64_t item) {
      const int64_t i = item / 2, bytes = item % 2 == 0 ? store.gate_up_bytes() : store.down_bytes();
      const auto* from = static_cast<const std::byte*>(item % 2 == 0 ? store.gate_up : store.down);
      std::byte* to = job.out + (item % 2 == 0 ? 0 : job.count * store.gate_up_bytes()) + i * bytes;
      if (ids[i] == -1) std::memset(to, 0, bytes);
      else std::memcpy(to, from + (layer * store.experts + ids[i]) * bytes, bytes);
    });
    return true;
  }

  std::vector<Store> stores_;  // the leader reads it after it took its job under `mutex_`
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::atomic<int64_t> num_queued_{0};
  std::atomic<bool> stopped_{false}, failed_{false};
  uint32_t last_ticket_ = 0;
  Buffer buffers_[kStagingBuffers];
  Flags* flags_ = nullptr;
  ThreadPool pool_;
  std::thread leader_;
};

// Open queues by number. Programs name a queue by its number; a number is reused once its queue is closed, so that equal engines compile
// equal programs.
class QueueTable {
 public:
  static QueueTable& all() {
    static QueueTable table;
    return table;
  }
  int64_t open(std::vector<Store> stores, int64_t threads) {
    auto queue = std::make_shared<HostExpertQueue>(std::move(stores), threads);
    std::lock_guard<std::mutex> lock(mutex_);
    size_t number = std::find(queues_.begin(), queues_.end(), nullptr) - queues_.begin();
    if (number == queues_.size()) queues_.emplace_back();
    queues_[number] = std::move(queue);
    return number;
  }
  std::shared_ptr<HostExpertQueue> at(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return number >= 0 && number < int64_t(queues_.size()) ? queues_[number] : nullptr;
  }
  void close(int64_t number) {
    std::shared_ptr<HostExpertQueue> queue = at(number);  // its threads end outside of the lock
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue != nullptr) queues_[number] = nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<HostExpertQueue>> queues_;
};

}  // namespace rex
