// The few calls of the NVIDIA driver that a lane needs, found in the process at first use; no header and no library of CUDA's is wanted.
// Signals go through memory that both sides see: the stream writes and awaits words in it, or, where the driver refuses that, calls a
// function of the host which does the same.
#pragma once
#include <dlfcn.h>

#include "lane.h"

#ifndef REX_DRIVER
#define REX_DRIVER "libcuda.so.1"
#endif

namespace rex {

struct Card {
  using Stream = void*;
  using Address = unsigned long long;
  int (*stream_context)(Stream, void**) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int (*host_memory)(void**, size_t, unsigned) = nullptr;
  int (*to_host)(void*, Address, size_t, Stream) = nullptr;
  int (*to_card)(Address, const void*, size_t, Stream) = nullptr;
  int (*call)(Stream, void (*)(void*), void*) = nullptr;
  int (*write)(Stream, Address, uint32_t, unsigned) = nullptr;
  int (*await)(Stream, Address, uint32_t, unsigned) = nullptr;
  bool there = false;

  static const Card& get() {
    static const Card card = [] {
      Card found;
      void* library = dlopen(REX_DRIVER, RTLD_NOW | RTLD_LOCAL);
      auto find = [&](auto& function, const char* name) {
        function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
        return function != nullptr;
      };
      found.there = find(found.stream_context, "cuStreamGetCtx") & find(found.push, "cuCtxPushCurrent_v2") &
                    find(found.pop, "cuCtxPopCurrent_v2") & find(found.host_memory, "cuMemHostAlloc") &
                    find(found.to_host, "cuMemcpyDtoHAsync_v2") & find(found.to_card, "cuMemcpyHtoDAsync_v2") &
                    find(found.call, "cuLaunchHostFunc") & find(found.write, "cuStreamWriteValue32_v2") &
                    find(found.await, "cuStreamWaitValue32_v2");
      return found;
    }();
    return card;
  }
};

// Memory that the card's copies read and write at full speed; null where there is none. Any context may use it.
inline void* pinned(size_t bytes) {
  void* memory = nullptr;
  constexpr unsigned kPortable = 1, kMapped = 2;
  return Card::get().host_memory(&memory, bytes, kPortable | kMapped) == 0 ? memory : nullptr;
}

// The stream's context, current while this lives.
class InContext {
 public:
  explicit InContext(Card::Stream stream) {
    void* context = nullptr;
    fine_ = Card::get().stream_context(stream, &context) == 0 && Card::get().push(context) == 0;
  }
  ~InContext() {
    void* context = nullptr;
    if (fine_) Card::get().pop(&context);
  }
  bool fine() const { return fine_; }

 private:
  bool fine_;
};

// A ticket's signal, on the stream: what was enqueued before has ended when it is seen, what is enqueued after begins when it was.
class Signal {
 public:
  Signal(Lane& lane, Card::Stream stream, uint32_t ticket) : lane_(lane), stream_(stream), ticket_(ticket) {}

  bool tell_arrived() const {
    return word(Card::get().write, &lane_.flags()->arrived) || called([](const Call& c) {
      c.flags->arrived.store(c.ticket, std::memory_order_release);
    });
  }
  bool await_done() const {
    return word(Card::get().await, &lane_.flags()->done) || called([](const Call& c) {
      for (int spins = 0; !reached(c.flags->done.load(std::memory_order_acquire), c.ticket);) backoff(spins);
    });
  }

 private:
  struct Call {
    Flags* flags;
    uint32_t ticket;
    void (*body)(const Call&);
  };

  bool word(int (*operation)(Card::Stream, Card::Address, uint32_t, unsigned), std::atomic<uint32_t>* flag) const {
    constexpr unsigned kAtLeast = 0;  // of the wait, in cyclic order; of the write: behind a fence
    return !lane_.calls_back.load() && operation(stream_, reinterpret_cast<Card::Address>(flag), ticket_, kAtLeast) == 0;
  }
  bool called(void (*body)(const Call&)) const {
    lane_.calls_back.store(true);
    auto run = [](void* given) {
      const std::unique_ptr<Call> call(static_cast<Call*>(given));
      call->body(*call);
    };
    auto call = std::make_unique<Call>(Call{lane_.flags(), ticket_, body});
    if (Card::get().call(stream_, run, call.get()) != 0) return false;
    call.release();
    return true;
  }

  Lane& lane_;
  Card::Stream stream_;
  uint32_t ticket_;
};

}  // namespace rex
