// Begin and end of an errand as XLA FFI handlers, on the CPU and on an NVIDIA GPU. `begin` gives x back as it is, the same memory: who
// runs on that begins afterwards. `end` gives back what it comes after, so that it does not begin before.
#pragma once
#include <cstring>

#include "card.h"
#include "handlers.h"

namespace rex {

inline ffi::Error begin_fault(const std::shared_ptr<Lane>& lane, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, void* same, int64_t store,
                              int64_t top_k) {
  if (lane == nullptr) return ffi::Error::Internal("the lane of this program's engine is closed");
  if (lane->failed()) return ffi::Error::InvalidArgument("an expert id was outside 0..experts-1, or a layer outside its store");
  const Store* experts = lane->store(store);
  const auto rows = x.dimensions();
  if (experts == nullptr || rows.size() != 2 || rows[1] != experts->hidden || int64_t(words.element_count()) != 1 + 2 * rows[0] * top_k)
    return mismatch("x is [N, D] of a store of the lane, words are [1 + 2 N K]");
  if (same != x.untyped_data()) return ffi::Error::Internal("x was copied");
  return dispatch_dtype(x.element_type(), [](auto) { return ffi::Error::Success(); });
}

inline ffi::Error end_fault(const std::shared_ptr<Lane>& lane, ffi::AnyBuffer after, void* same) {
  if (lane == nullptr) return ffi::Error::Internal("the lane of this program's engine is closed");
  if (same != after.untyped_data()) return ffi::Error::Internal("what the errand ends after was copied");
  return lane->last_ticket() == 0 ? ffi::Error::Internal("an errand ends that never began") : ffi::Error::Success();
}

// An errand without a desk.
inline ffi::Error no_memory(const Errand& errand, const char* whose, const char* fix) {
  const std::string bytes = std::to_string(errand.x_bytes() + errand.words_bytes() + errand.out_bytes());
  const std::string told = std::string(whose) + " refused " + bytes + " bytes of the host's memory for ";
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, told + std::to_string(errand.tokens) + " tokens of host experts; " + fix);
}

inline void* on_heap(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }

inline ffi::Error begin_on_cpu(ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, ffi::Result<ffi::AnyBuffer> same, int64_t lane_number,
                               int64_t store, int64_t top_k) {
  const std::shared_ptr<Lane> lane = Lanes::all().at(lane_number);
  if (ffi::Error fault = begin_fault(lane, x, words, same->untyped_data(), store, top_k); fault.failure()) return fault;
  const std::lock_guard<std::mutex> lock(lane->sending);
  const Errand errand = lane->next(x.dimensions()[0], top_k, x.dimensions()[1], x.element_type(), store, on_heap);
  if (errand.desk.x == nullptr) return no_memory(errand, "the system", "free some, or serve fewer tokens a step");
  std::memcpy(errand.desk.x, x.untyped_data(), errand.x_bytes());
  std::memcpy(errand.desk.words, words.typed_data(), errand.words_bytes());
  lane->flags()->arrived.store(errand.ticket, std::memory_order_release);
  lane->queue(errand);
  if (lane->in_turn.load()) lane->wait(errand.ticket);
  return ffi::Error::Success();
}

inline ffi::Error end_on_cpu(ffi::AnyBuffer after, ffi::Result<ffi::AnyBuffer> same, ffi::Result<ffi::Buffer<ffi::F32>> out,
                             int64_t lane_number) {
  const std::shared_ptr<Lane> lane = Lanes::all().at(lane_number);
  if (ffi::Error fault = end_fault(lane, after, same->untyped_data()); fault.failure()) return fault;
  const std::lock_guard<std::mutex> lock(lane->sending);
  lane->wait(lane->last_ticket());
  if (lane->failed()) return ffi::Error::InvalidArgument("an expert id is outside 0..experts-1, or the layer outside its store");
  std::memcpy(out->typed_data(), lane->desk_out(), out->size_bytes());
  return ffi::Error::Success();
}

inline ffi::Error refused(const char* what) { return ffi::Error::Internal(std::string("the NVIDIA driver refused ") + what); }

inline ffi::Error begin_on_gpu(void* stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> words, ffi::Result<ffi::AnyBuffer> same,
                               int64_t lane_number, int64_t store, int64_t top_k) {
  const std::shared_ptr<Lane> lane = Lanes::all().at(lane_number);
  if (ffi::Error fault = begin_fault(lane, x, words, same->untyped_data(), store, top_k); fault.failure()) return fault;
  const Card& card = Card::get();
  if (!card.there) return ffi::Error::Internal(REX_DRIVER " lacks a call, or is not there; use host_backend='dispatch'");
  const InContext context(stream);
  if (!context.fine()) return refused("the stream's context");
  const std::lock_guard<std::mutex> lock(lane->sending);
  const Errand errand = lane->next(x.dimensions()[0], top_k, x.dimensions()[1], x.element_type(), store, pinned);
  if (errand.desk.x == nullptr)
    return no_memory(errand, "the NVIDIA driver", "let this process lock more (ulimit -l), or use host_backend='dispatch'");
  const auto from = [](const void* data) { return reinterpret_cast<Card::Address>(data); };
  if (card.to_host(errand.desk.x, from(x.untyped_data()), errand.x_bytes(), stream) != 0 ||
      card.to_host(errand.desk.words, from(words.typed_data()), errand.words_bytes(), stream) != 0)
    return refused("a copy to the host");
  const Signal signal(*lane, stream, errand.ticket);
  if (!signal.tell_arrived()) return refused("a signal");
  lane->queue(errand);
  if (lane->in_turn.load() && !signal.await_done()) return refused("a wait");
  return ffi::Error::Success();
}

inline ffi::Error end_on_gpu(void* stream, ffi::AnyBuffer after, ffi::Result<ffi::AnyBuffer> same, ffi::Result<ffi::Buffer<ffi::F32>> out,
                             int64_t lane_number) {
  const std::shared_ptr<Lane> lane = Lanes::all().at(lane_number);
  if (ffi::Error fault = end_fault(lane, after, same->untyped_data()); fault.failure()) return fault;
  const InContext context(stream);
  if (!context.fine()) return refused("the stream's context");
  const std::lock_guard<std::mutex> lock(lane->sending);
  if (!Signal(*lane, stream, lane->last_ticket()).await_done()) return refused("a wait");
  if (Card::get().to_card(reinterpret_cast<Card::Address>(out->typed_data()), lane->desk_out(), out->size_bytes(), stream) != 0)
    return refused("a copy from the host");
  return ffi::Error::Success();
}

}  // namespace rex

// What Python calls by itself. A dtype is XLA's number of it.
extern "C" int64_t RexLaneOpen(int64_t threads, int64_t count, const void* const* arrays, const int32_t* dtypes, const int64_t* sizes) {
  std::vector<rex::Store> stores;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* size = sizes + 4 * i;
    stores.push_back({arrays[2 * i], arrays[2 * i + 1], static_cast<ffi::DataType>(dtypes[i]), size[0], size[1], size[2], size[3]});
  }
  return rex::Lanes::all().open(std::move(stores), threads);
}
extern "C" bool RexLaneRestock(int64_t lane, const void* const* arrays) { return rex::Lanes::all().at(lane)->restock(arrays); }
extern "C" void RexLaneClose(int64_t lane) { rex::Lanes::all().close(lane); }
extern "C" void RexLaneSet(int64_t number, bool in_turn, bool calls_back) {
  const auto lane = rex::Lanes::all().at(number);
  lane->in_turn.store(in_turn), lane->calls_back.store(calls_back);
}
extern "C" void RexLaneTold(int64_t number, int64_t* told) {
  const auto lane = rex::Lanes::all().at(number);
  told[0] = lane->num_errands.load(), told[1] = lane->busy_ns.load(), told[2] = lane->calls_back.load();
}
