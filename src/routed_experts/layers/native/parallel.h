// Work shared between the caller and XLA's own threads. Items are handed out one by one, so unequal ones balance; the caller
// takes part and waits only for items that were begun, so a busy pool makes it slower and never stops it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace rex {

template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t items, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    int64_t items;
    const Body* body;  // the caller's; read only by who holds an item
    void work() {
      for (int64_t item; (item = next.fetch_add(1)) < items;) {
        (*body)(item);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto state = std::make_shared<State>();
  state->items = items;
  state->body = &body;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([state] { state->work(); });
  state->work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < items; spins++)
    if (spins > 2000) std::this_thread::yield();
}

}  // namespace rex
