// A stand-in for the NVIDIA driver, of the calls that a host expert queue makes: a stream is a thread that runs its calls one after
// another. And runs of jobs on it, each over arrays of its own, enqueued without waiting as a program on a GPU enqueues them.
#include <cstdlib>
#include <cstring>
#include <future>

#include "host_expert_handlers.h"

namespace {

struct Stream {
  explicit Stream(bool words) : words(words), thread([this] { work(); }) {}
  ~Stream() {
    put(nullptr);
    thread.join();
  }
  int put(std::function<void()> call) {
    std::lock_guard<std::mutex> lock(mutex);
    calls.push_back(std::move(call));
    wake.notify_one();
    return 0;
  }
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [this] { return !calls.empty(); });
      const std::function<void()> call = std::move(calls.front());
      calls.pop_front();
      lock.unlock();
      if (call == nullptr) return;
      call();
    }
  }
  const bool words;  // whether it writes and awaits words of memory
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> calls;
  std::thread thread;
};

std::atomic<int> granted{1 << 30};  // allocations that still succeed

Stream& of(void* stream) { return *static_cast<Stream*>(stream); }
constexpr int kNotSupported = 801;

// A buffer of an FFI call over memory of the test.
struct Array {
  Array(XLA_FFI_DataType dtype, void* memory, std::initializer_list<int64_t> shape)
      : dims(shape), raw{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, memory, int64_t(dims.size()), dims.data()} {}
  Array(const Array&) = delete;
  ffi::AnyBuffer any() { return ffi::AnyBuffer(&raw); }
  ffi::Result<ffi::AnyBuffer> result() { return ffi::Result<ffi::AnyBuffer>(any()); }
  std::vector<int64_t> dims;
  XLA_FFI_Buffer raw;
};

struct Shape {
  int64_t queue, tokens, top_k, hidden;
};

ffi::Error submit(Stream& stream, const Shape& s, rex::JobKind kind, float* x, int32_t* words, int64_t num_words) {
  Array rows(XLA_FFI_DataType_F32, x, {s.tokens, s.hidden}), told(XLA_FFI_DataType_S32, words, {num_words});
  return rex::submit_on_gpu(&stream, rows.any(), ffi::Buffer<ffi::S32>(&told.raw), rows.result(), s.queue, int64_t(kind), 0, s.top_k);
}

ffi::Error wait(Stream& stream, const Shape& s, rex::JobKind kind, float* x, float* out) {
  Array rows(XLA_FFI_DataType_F32, x, {s.tokens, s.hidden}), sums(XLA_FFI_DataType_F32, out, {s.tokens, s.hidden});
  return rex::wait_sums_on_gpu(&stream, rows.any(), rows.result(), sums.result(), s.queue, int64_t(kind));
}

const char* message(const ffi::Error& error) {
  static std::string text;
  if (error.success()) return nullptr;
  return text = error.message(), text.c_str();
}

}  // namespace

extern "C" {
int cuStreamGetCtx(void* stream, void** context) { return *context = stream, 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return granted.fetch_sub(1) <= 0 || (*memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256)) == nullptr;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  return of(stream).put([=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  return of(stream).put([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
int cuLaunchHostFunc(void* stream, void (*call)(void*), void* argument) {
  return of(stream).put([=] { call(argument); });
}
int cuStreamWriteValue32_v2(void* stream, unsigned long long at, uint32_t value, unsigned) {
  if (!of(stream).words) return kNotSupported;
  return of(stream).put([=] { reinterpret_cast<std::atomic<uint32_t>*>(at)->store(value); });
}
int cuStreamWaitValue32_v2(void* stream, unsigned long long at, uint32_t value, unsigned) {
  if (!of(stream).words) return kNotSupported;
  return of(stream).put([=] {
    while (static_cast<int32_t>(reinterpret_cast<std::atomic<uint32_t>*>(at)->load() - value) < 0) std::this_thread::yield();
  });
}

void grant(int allocations) { granted.store(allocations); }

// Close a queue while its stream has jobs enqueued whose inputs have not arrived. Whether the stream ends all the same within
// `seconds`; out [N, D] is what it then copied.
bool abandon_jobs(int64_t queue, bool with_words, int64_t tokens, int64_t top_k, int64_t hidden, float* x, int32_t* words, float* out,
                  int64_t seconds) {
  auto* stream = new Stream(with_words);  // kept where it never ends
  std::promise<void> gate, ended;
  stream->put([opened = gate.get_future().share()] { opened.wait(); });
  const Shape shape{queue, tokens, top_k, hidden};
  for (int job = 0; job < 2; job++) {  // the second one stays in the queue
    if (submit(*stream, shape, rex::JobKind::kExperts, x, words, 1 + 2 * tokens * top_k).failure()) return false;
    if (wait(*stream, shape, rex::JobKind::kExperts, x, out).failure()) return false;
  }
  stream->put([&] { ended.set_value(); });
  RexQueueClose(queue);
  gate.set_value();
  if (ended.get_future().wait_for(std::chrono::seconds(seconds)) != std::future_status::ready) return false;
  delete stream;
  return true;
}

// x and out [L, N, D], words [L, 1 + 2 N K]; null, or the error of a handler.
const char* enqueue_jobs(int64_t queue, bool with_words, int64_t layers, int64_t tokens, int64_t top_k, int64_t hidden, float* x,
                         int32_t* words, float* out) {
  Stream stream(with_words);
  const Shape shape{queue, tokens, top_k, hidden};
  const int64_t rows = tokens * hidden, length = 1 + 2 * tokens * top_k;
  for (int64_t i = 0; i < layers; i++) {
    ffi::Error error = submit(stream, shape, rex::JobKind::kExperts, x + i * rows, words + i * length, length);
    if (error.success()) error = wait(stream, shape, rex::JobKind::kExperts, x + i * rows, out + i * rows);
    if (error.failure()) return message(error);
  }
  return nullptr;
}

// The same with a deferred job in every layer, of `deferred` words, which the next layer waits for; late [L, N, D] has its sums.
const char* enqueue_deferred_jobs(int64_t queue, bool with_words, int64_t layers, int64_t tokens, int64_t top_k, int64_t hidden, float* x,
                                  int32_t* words, int32_t* deferred, float* out, float* late) {
  Stream stream(with_words);
  const Shape shape{queue, tokens, top_k, hidden};
  const int64_t rows = tokens * hidden, length = 1 + 2 * tokens * top_k;
  for (int64_t i = 0; i <= layers; i++) {
    ffi::Error error = ffi::Error::Success();
    if (i < layers) error = submit(stream, shape, rex::JobKind::kExperts, x + i * rows, words + i * length, length);
    if (i < layers && error.success())
      error = submit(stream, shape, rex::JobKind::kDeferredExperts, x + i * rows, deferred + i * length, length);
    if (i < layers && error.success()) error = wait(stream, shape, rex::JobKind::kExperts, x + i * rows, out + i * rows);
    if (i > 0 && error.success()) error = wait(stream, shape, rex::JobKind::kDeferredExperts, x, late + (i - 1) * rows);
    if (error.failure()) return message(error);
  }
  return nullptr;
}

// Copies of weights, each enqueued before the one before it is waited for. words [L, 1 + C]; gate_up [L, C, D, 2F], down [L, C, F, D].
const char* enqueue_weights(int64_t queue, bool with_words, int64_t jobs, int64_t experts, int64_t hidden, int64_t width, int32_t* words,
                            float* gate_up, float* down) {
  Stream stream(with_words);
  std::vector<float> x(hidden);
  const Shape shape{queue, 1, 0, hidden};
  for (int64_t i = 0; i <= jobs; i++) {
    if (i < jobs) {
      const ffi::Error error = submit(stream, shape, rex::JobKind::kWeights, x.data(), words + i * (1 + experts), 1 + experts);
      if (error.failure()) return message(error);
    }
    if (i == 0) continue;
    const int64_t size = experts * hidden * width, first = (i - 1) * size;
    Array rows(XLA_FFI_DataType_F32, x.data(), {1, hidden});
    Array wide(XLA_FFI_DataType_F32, gate_up + 2 * first, {experts, hidden, 2 * width}), thin(XLA_FFI_DataType_F32, down + first, {experts, width, hidden});
    const ffi::Error error = rex::wait_weights_on_gpu(&stream, rows.any(), rows.result(), wide.result(), thin.result(), queue);
    if (error.failure()) return message(error);
  }
  return nullptr;
}
}
