// The calls of the NVIDIA driver that a host expert queue needs, looked up in the process at first use: no CUDA header or library is
// linked. Signals are words in memory that host and GPU share: a stream writes and awaits them, or, where the driver refuses that, calls
// a function of the host that does.
#pragma once
#include <dlfcn.h>

#include "host_expert_queue.h"

#ifndef REX_DRIVER
#define REX_DRIVER "libcuda.so.1"
#endif

namespace rex {

struct CudaDriver {
  using Stream = void*;
  using Address = unsigned long long;
  int (*stream_context)(Stream, void**) = nullptr;
  int (*push_context)(void*) = nullptr;
  int (*pop_context)(void**) = nullptr;
  int (*allocate_pinned)(void**, size_t, unsigned) = nullptr;
  int (*copy_to_host)(void*, Address, size_t, Stream) = nullptr;
  int (*copy_to_device)(Address, const void*, size_t, Stream) = nullptr;
  int (*launch_host_function)(Stream, void (*)(void*), void*) = nullptr;
  int (*write_word)(Stream, Address, uint32_t, unsigned) = nullptr;
  int (*await_word)(Stream, Address, uint32_t, unsigned) = nullptr;
  bool available = false;

  static const CudaDriver& get() {
    static const CudaDriver driver = [] {
      CudaDriver calls;
      void* library = dlopen(REX_DRIVER, RTLD_NOW | RTLD_LOCAL);
      auto find = [&](auto& function, const char* name) {
        function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
        return function != nullptr;
      };
      calls.available = find(calls.stream_context, "cuStreamGetCtx") & find(calls.push_context, "cuCtxPushCurrent_v2") &
                        find(calls.pop_context, "cuCtxPopCurrent_v2") & find(calls.allocate_pinned, "cuMemHostAlloc") &
                        find(calls.copy_to_host, "cuMemcpyDtoHAsync_v2") & find(calls.copy_to_device, "cuMemcpyHtoDAsync_v2") &
                        find(calls.launch_host_function, "cuLaunchHostFunc") & find(calls.write_word, "cuStreamWriteValue32_v2") &
                        find(calls.await_word, "cuStreamWaitValue32_v2");
      return calls;
    }();
    return driver;
  }
};

inline CudaDriver::Address device_address(const void* data) { return reinterpret_cast<CudaDriver::Address>(data); }

// Pinned memory, which the GPU copies at full speed, usable in any context; null where the driver refuses it.
inline void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  constexpr unsigned kPortable = 1, kMapped = 2;
  return CudaDriver::get().allocate_pinned(&memory, bytes, kPortable | kMapped) == 0 ? memory : nullptr;
}

// Makes a stream's context current for its own lifetime.
class StreamContext {
 public:
  explicit StreamContext(CudaDriver::Stream stream) {
    void* context = nullptr;
    const CudaDriver& driver = CudaDriver::get();
    ok_ = driver.stream_context(stream, &context) == 0 && driver.push_context(context) == 0;
  }
  ~StreamContext() {
    void* context = nullptr;
    if (ok_) CudaDriver::get().pop_context(&context);
  }
  bool ok() const { return ok_; }

 private:
  bool ok_;
};

// A ticket's signals on a stream. `arrived` follows all that was enqueued before it; what is enqueued after a wait follows `done`.
class Signal {
 public:
  Signal(HostExpertQueue& queue, CudaDriver::Stream stream, uint32_t ticket) : queue_(queue), stream_(stream), ticket_(ticket) {}

  bool send_arrived() const {
    return use_word(CudaDriver::get().write_word, &queue_.flags()->arrived) || use_callback([](const Callback& c) {
      c.flags->arrived.store(c.ticket, std::memory_order_release);
    });
  }
  bool await_done() const {
    return use_word(CudaDriver::get().await_word, &queue_.flags()->done) || use_callback([](const Callback& c) {
      for (int spins = 0; !reached(c.flags->done.load(std::memory_order_acquire), c.ticket);) backoff(spins);
    });
  }

 private:
  struct Callback {
    Flags* flags;
    uint32_t ticket;
    void (*body)(const Callback&);
  };

  bool use_word(int (*operation)(CudaDriver::Stream, CudaDriver::Address, uint32_t, unsigned), std::atomic<uint32_t>* flag) const {
    constexpr unsigned kDefault = 0;  // a wait: at least, in cyclic order; a write: after a memory barrier
    return !queue_.uses_callbacks.load() && operation(stream_, device_address(flag), ticket_, kDefault) == 0;
  }
  bool use_callback(void (*body)(const Callback&)) const {
    queue_.uses_callbacks.store(true);
    auto run = [](void* argument) {
      const std::unique_ptr<Callback> callback(static_cast<Callback*>(argument));
      callback->body(*callback);
    };
    auto callback = std::make_unique<Callback>(Callback{queue_.flags(), ticket_, body});
    if (CudaDriver::get().launch_host_function(stream_, run, callback.get()) != 0) return false;
    callback.release();
    return true;
  }

  HostExpertQueue& queue_;
  CudaDriver::Stream stream_;
  uint32_t ticket_;
};

}  // namespace rex
