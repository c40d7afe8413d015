// A stand-in for the NVIDIA driver, of as many calls as a lane makes: a stream is a thread that does one thing after another. And a
// run of errands on it, each over memory of its own, as a program on a GPU would enqueue them without waiting.
#include <cstdlib>
#include <cstring>
#include <future>

#include "lane_handler.h"

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

std::atomic<int> granted{1 << 30};  // requests for memory that are still met

Stream& of(void* stream) { return *static_cast<Stream*>(stream); }
constexpr int kNotSupported = 801;

XLA_FFI_Buffer buffer(XLA_FFI_DataType dtype, void* memory, int64_t* dims, int64_t rank) {
  return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, memory, rank, dims};
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
int cuLaunchHostFunc(void* stream, void (*call)(void*), void* given) {
  return of(stream).put([=] { call(given); });
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

void grant(int requests) { granted.store(requests); }

// Close a lane while its stream has errands enqueued whose input has not arrived. Whether the stream ends all the same within
// `seconds`; out [N, D] is what it then copied.
bool abandon_errand(int64_t lane, bool with_words, int64_t tokens, int64_t top_k, int64_t hidden, float* x, int32_t* words,
                    float* out, int64_t seconds) {
  auto* stream = new Stream(with_words);  // kept where it never ends
  std::promise<void> gate, ended;
  stream->put([opened = gate.get_future().share()] { opened.wait(); });
  int64_t rows[] = {tokens, hidden}, length[] = {1 + 2 * tokens * top_k};
  XLA_FFI_Buffer fed = buffer(XLA_FFI_DataType_F32, x, rows, 2), told = buffer(XLA_FFI_DataType_S32, words, length, 1);
  XLA_FFI_Buffer given = buffer(XLA_FFI_DataType_F32, out, rows, 2);
  const ffi::AnyBuffer from(&fed);
  const ffi::Buffer<ffi::S32> told_words(&told);
  for (int errand = 0; errand < 2; errand++) {  // the second one stays in the queue
    if (rex::begin_on_gpu(stream, from, told_words, ffi::Result<ffi::AnyBuffer>(from), lane, 0, top_k).failure()) return false;
    ffi::Result<ffi::Buffer<ffi::F32>> sums{ffi::Buffer<ffi::F32>(&given)};
    if (rex::end_on_gpu(stream, from, ffi::Result<ffi::AnyBuffer>(from), sums, lane).failure()) return false;
  }
  stream->put([&] { ended.set_value(); });
  RexLaneClose(lane);
  gate.set_value();
  if (ended.get_future().wait_for(std::chrono::seconds(seconds)) != std::future_status::ready) return false;
  delete stream;
  return true;
}

// x and out [L, N, D], words [L, 1 + 2 N K]; null, or what a handler complained of.
const char* enqueue_errands(int64_t lane, bool with_words, int64_t errands, int64_t tokens, int64_t top_k, int64_t hidden, float* x,
                            int32_t* words, float* out) {
  static std::string complaint;
  Stream stream(with_words);
  int64_t rows[] = {tokens, hidden}, length[] = {1 + 2 * tokens * top_k};
  for (int64_t i = 0; i < errands; i++) {
    XLA_FFI_Buffer fed = buffer(XLA_FFI_DataType_F32, x + i * tokens * hidden, rows, 2);
    XLA_FFI_Buffer told = buffer(XLA_FFI_DataType_S32, words + i * length[0], length, 1);
    XLA_FFI_Buffer given = buffer(XLA_FFI_DataType_F32, out + i * tokens * hidden, rows, 2);
    const ffi::AnyBuffer from(&fed);
    ffi::Error error = rex::begin_on_gpu(&stream, from, ffi::Buffer<ffi::S32>(&told), ffi::Result<ffi::AnyBuffer>(from), lane, 0, top_k);
    if (error.success())
      error = rex::end_on_gpu(&stream, from, ffi::Result<ffi::AnyBuffer>(from), ffi::Result<ffi::Buffer<ffi::F32>>(ffi::Buffer<ffi::F32>(&given)),
                              lane);
    if (error.failure()) return complaint = error.message(), complaint.c_str();
  }
  return nullptr;
}
}
