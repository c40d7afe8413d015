// Submit and wait as XLA FFI handlers, on the CPU and on an NVIDIA GPU. They order the program: `submit` returns x, the same memory, to
// the operations that run in parallel with the job; `wait` returns the operand that later operations use.
#pragma once
#include <cstring>

#include "cuda_driver.h"
#include "handlers.h"

namespace rex {

constexpr const char* kNoNumbers = "an expert id is outside 0..experts-1, or the layer outside its store";

// How a platform moves the bytes of jobs and signals them. Each call returns success, or names the failed operation.
struct CpuTransfer {
  HostExpertQueue& queue;

  static void* allocate(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  static constexpr const char* kAllocator = "the system";
  static constexpr const char* kMemoryFix = "free some, or serve fewer tokens a step";

  const char* to_host(void* to, const void* from, size_t bytes) const { return std::memcpy(to, from, bytes), nullptr; }
  const char* to_device(void* to, const void* from, size_t bytes) const { return std::memcpy(to, from, bytes), nullptr; }
  const char* send_arrived(const Job& job) const {
    queue.flags()->arrived.store(job.ticket, std::memory_order_release);
    return nullptr;
  }
  const char* await_done(const Job& job) const {
    queue.wait(job.ticket);
    return queue.failed() ? kNoNumbers : nullptr;
  }
};

struct GpuTransfer {
  HostExpertQueue& queue;
  CudaDriver::Stream stream;

  static void* allocate(size_t bytes) { return allocate_pinned(bytes); }
  static constexpr const char* kAllocator = "the NVIDIA driver";
  static constexpr const char* kMemoryFix = "let this process lock more (ulimit -l), or serve fewer tokens a step";

  const char* to_host(void* to, const void* from, size_t bytes) const {
    const bool ok = CudaDriver::get().copy_to_host(to, device_address(from), bytes, stream) == 0;
    return ok ? nullptr : "the NVIDIA driver refused a copy to the host";
  }
  const char* to_device(void* to, const void* from, size_t bytes) const {
    const bool ok = CudaDriver::get().copy_to_device(device_address(to), from, bytes, stream) == 0;
    return ok ? nullptr : "the NVIDIA driver refused a copy from the host";
  }
  const char* send_arrived(const Job& job) const {
    return Signal(queue, stream, job.ticket).send_arrived() ? nullptr : "the NVIDIA driver refused a signal";
  }
  const char* await_done(const Job& job) const {
    return Signal(queue, stream, job.ticket).await_done() ? nullptr : "the NVIDIA driver refused a wait";
  }
};

inline ffi::Error memory_refused(const Job& job, const char* allocator, const char* fix) {
  const std::string what = job.copies_weights() ? " streamed experts; " : " tokens of host experts; ";
  const std::string text = std::string(allocator) + " refused " + std::to_string(job.x_bytes() + job.words_bytes() + job.out_bytes) + " bytes of the host's memory for ";
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, text + std::to_string(job.count) + what + fix);
}

template <class Transfer>
ffi::Error submit(const Transfer& transfer, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, void* same, int64_t kind, int64_t store_index,
                  int64_t top_k) {
  HostExpertQueue& queue = transfer.queue;
  if (queue.failed()) return ffi::Error::InvalidArgument(std::string("an earlier job failed: ") + kNoNumbers);
  const Store* store = queue.store(store_index);
  const auto rows = x.dimensions();
  if (store == nullptr || rows.size() != 2 || rows[1] != store->hidden) return mismatch("x is [N, D] of a store of the queue");
  if (same != x.untyped_data()) return ffi::Error::Internal("x was copied");
  if (ffi::Error fault = dispatch_dtype(x.element_type(), [](auto) { return ffi::Error::Success(); }); fault.failure()) return fault;
  Job job{static_cast<JobKind>(kind), rows[0], top_k, rows[1], store_index, x.element_type(), 0};
  if (job.copies_weights()) job.count = words.element_count() - 1;
  job.out_bytes = job.copies_weights() ? job.count * (store->gate_up_bytes() + store->down_bytes()) : job.count * job.hidden * sizeof(float);
  if (int64_t(words.element_count()) != job.num_words()) return mismatch("words are [1 + 2 N K], or [1 + C] for the weights of C experts");
  const std::lock_guard<std::mutex> lock(queue.submitting);
  if (queue.is_full()) return ffi::Error::Internal("too many jobs are outstanding");
  if (!queue.prepare(job, Transfer::allocate)) return memory_refused(job, Transfer::kAllocator, Transfer::kMemoryFix);
  const char* fault = job.copies_weights() ? nullptr : transfer.to_host(job.x, x.untyped_data(), job.x_bytes());
  if (fault == nullptr) fault = transfer.to_host(job.words, words.typed_data(), job.words_bytes());
  if (fault == nullptr) fault = transfer.send_arrived(job);
  if (fault != nullptr) return ffi::Error::Internal(fault);
  queue.push(job);
  if (queue.serial.load()) fault = transfer.await_done(job);
  return fault == nullptr ? ffi::Error::Success() : ffi::Error::Internal(fault);
}

// Outputs of the oldest outstanding job of a kind: one array of sums, or gate_up and down of its experts.
template <class Transfer>
ffi::Error wait(const Transfer& transfer, ffi::AnyBuffer after, void* same, JobKind kind, std::initializer_list<ffi::AnyBuffer*> outputs) {
  HostExpertQueue& queue = transfer.queue;
  if (same != after.untyped_data()) return ffi::Error::Internal("what the wait runs after was copied");
  const std::lock_guard<std::mutex> lock(queue.submitting);
  const Job job = queue.take_outstanding(kind);
  if (job.ticket == 0) return ffi::Error::Internal("a wait for a job that was never submitted");
  if (const char* fault = transfer.await_done(job); fault != nullptr) return ffi::Error::InvalidArgument(fault);
  int64_t offset = 0;
  for (ffi::AnyBuffer* output : outputs) {
    const int64_t bytes = output->size_bytes();
    if (offset + bytes > job.out_bytes) return mismatch("the outputs of the wait are those of the job");
    if (const char* fault = transfer.to_device(output->untyped_data(), job.out + offset, bytes); fault != nullptr)
      return ffi::Error::Internal(fault);
    offset += bytes;
  }
  return ffi::Error::Success();
}

// Calls body(transfer) for an open queue, on the CPU.
template <class Body>
ffi::Error on_cpu(int64_t number, Body&& body) {
  const std::shared_ptr<HostExpertQueue> queue = QueueTable::all().at(number);
  if (queue == nullptr) return ffi::Error::Internal("the host expert queue of this program's engine is closed");
  return body(CpuTransfer{*queue});
}

// The same on a GPU, in the context of the program's stream.
template <class Body>
ffi::Error on_gpu(int64_t number, void* stream, Body&& body) {
  const std::shared_ptr<HostExpertQueue> queue = QueueTable::all().at(number);
  if (queue == nullptr) return ffi::Error::Internal("the host expert queue of this program's engine is closed");
  if (!CudaDriver::get().available) return ffi::Error::Internal(REX_DRIVER " is missing or lacks a call; update the NVIDIA driver");
  const StreamContext context(stream);
  if (!context.ok()) return ffi::Error::Internal("the NVIDIA driver refused the stream's context");
  return body(GpuTransfer{*queue, stream});
}

using Array = ffi::Result<ffi::AnyBuffer>;

inline ffi::Error submit_on_cpu(ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, Array same, int64_t queue, int64_t kind, int64_t store,
                                int64_t top_k) {
  return on_cpu(queue, [&](auto transfer) { return submit(transfer, x, words, same->untyped_data(), kind, store, top_k); });
}
inline ffi::Error submit_on_gpu(void* stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, Array same, int64_t queue, int64_t kind,
                                int64_t store, int64_t top_k) {
  return on_gpu(queue, stream, [&](auto transfer) { return submit(transfer, x, words, same->untyped_data(), kind, store, top_k); });
}

inline ffi::Error wait_sums_on_cpu(ffi::AnyBuffer after, Array same, Array sums, int64_t queue, int64_t kind) {
  return on_cpu(queue, [&](auto transfer) { return wait(transfer, after, same->untyped_data(), static_cast<JobKind>(kind), {&*sums}); });
}
inline ffi::Error wait_sums_on_gpu(void* stream, ffi::AnyBuffer after, Array same, Array sums, int64_t queue, int64_t kind) {
  return on_gpu(queue, stream,
                [&](auto transfer) { return wait(transfer, after, same->untyped_data(), static_cast<JobKind>(kind), {&*sums}); });
}

inline ffi::Error wait_weights_on_cpu(ffi::AnyBuffer after, Array same, Array gate_up, Array down, int64_t queue) {
  return on_cpu(queue, [&](auto transfer) { return wait(transfer, after, same->untyped_data(), JobKind::kWeights, {&*gate_up, &*down}); });
}
inline ffi::Error wait_weights_on_gpu(void* stream, ffi::AnyBuffer after, Array same, Array gate_up, Array down, int64_t queue) {
  return on_gpu(queue, stream,
                [&](auto transfer) { return wait(transfer, after, same->untyped_data(), JobKind::kWeights, {&*gate_up, &*down}); });
}

}  // namespace rex

// What Python calls itself. A dtype is XLA's number of it.
extern "C" int64_t RexQueueOpen(int64_t threads, int64_t count, const void* const* arrays, const int32_t* dtypes, const int64_t* sizes) {
  std::vector<rex::Store> stores;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* size = sizes + 4 * i;
    stores.push_back({arrays[2 * i], arrays[2 * i + 1], static_cast<ffi::DataType>(dtypes[i]), size[0], size[1], size[2], size[3]});
  }
  return rex::QueueTable::all().open(std::move(stores), threads);
}
extern "C" bool RexQueueSwapWeights(int64_t queue, const void* const* arrays) { return rex::QueueTable::all().at(queue)->swap_weights(arrays); }
extern "C" void RexQueueClose(int64_t queue) { rex::QueueTable::all().close(queue); }
extern "C" void RexQueueSetSignals(int64_t number, bool serial, bool callbacks) {
  const auto queue = rex::QueueTable::all().at(number);
  queue->serial.store(serial), queue->uses_callbacks.store(callbacks);
}
extern "C" void RexQueueStats(int64_t number, int64_t* stats) {
  const auto queue = rex::QueueTable::all().at(number);
  stats[0] = queue->num_jobs.load(), stats[1] = queue->busy_ns.load(), stats[2] = queue->uses_callbacks.load();
}
