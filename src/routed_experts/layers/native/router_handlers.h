// The handlers of routers: check shapes and dtypes, then route.
#pragma once
#include "handlers.h"
#include "router.h"

namespace rex {

// What a law asks of sizes that these are not; null where it can run. Groups are compared only where some of them are left out.
inline const char* router_fault(const RouterLaw& law, int64_t experts, int64_t top_k) {
  if (top_k < 1 || top_k > experts) return "K is at least 1 and at most E";
  if (law.num_groups < 1 || experts % law.num_groups != 0 || law.topk_group < 1 || law.topk_group > law.num_groups)
    return "groups are equal parts of the experts";
  if (law.topk_group != law.num_groups && (law.group_score_topk < 1 || law.group_score_topk > experts / law.num_groups))
    return "the score of a group is of at most its experts";
  return nullptr;
}

// The law and its inputs, as both handlers have them. `bias` [E]; `replay_ids` [N, K] and `replay_valid` [N]; all [0] for none.
struct RouterCall {
  RouterShape shape;
  ReplayRows replay;
  const char* fault = nullptr;

  RouterCall(ffi::Buffer<ffi::F32>& logits, ffi::Buffer<ffi::F32>& bias, ffi::Buffer<ffi::S32>& replay_ids,
             ffi::Buffer<ffi::PRED>& replay_valid, int64_t top_k, RouterLaw law) {
    const auto rows = logits.dimensions();
    const int64_t biases = bias.element_count(), given = replay_ids.element_count();
    shape = {rows[0], rows[1], top_k, law, rows[0]};
    if (biases != 0) shape.law.bias = bias.typed_data();
    if (given != 0) replay = {replay_ids.typed_data(), replay_valid.typed_data()};
    fault = router_fault(law, shape.experts, top_k);
    if (biases != 0 && biases != shape.experts) {
      fault = "logits are [N, E], and a bias is [E]";
    } else if (given != 0 && (given != shape.tokens * top_k || int64_t(replay_valid.element_count()) != shape.tokens)) {
      fault = "rows to replay are [N, K], and [N]";
    }
    for (int64_t n = 0; fault == nullptr && n < shape.tokens; n++)
      for (int64_t k = 0; replay.has(n) && k < top_k; k++)
        if (const int32_t id = replay.ids[n * top_k + k]; id < 0 || id >= shape.experts) fault = "a row to replay names an expert that does not exist";
  }
};

inline RouterLaw router_law(int64_t scoring, bool renormalize, float scale, float epsilon, float jitter_eps, int64_t num_groups,
                            int64_t topk_group, int64_t group_score_topk) {
  return {Scoring(scoring), renormalize, scale, epsilon, jitter_eps, num_groups, topk_group, group_score_topk};
}

ffi::Error run_router(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> replay_ids,
                      ffi::Buffer<ffi::PRED> replay_valid, ffi::Result<ffi::Buffer<ffi::S32>> ids, ffi::Result<ffi::Buffer<ffi::S32>> native,
                      ffi::Result<ffi::Buffer<ffi::F32>> weights, int64_t scoring, bool renormalize, float scale, float epsilon,
                      float jitter_eps, int64_t num_groups, int64_t topk_group, int64_t group_score_topk) {
  const RouterLaw law = router_law(scoring, renormalize, scale, epsilon, jitter_eps, num_groups, topk_group, group_score_topk);
  const RouterCall call(logits, bias, replay_ids, replay_valid, ids->dimensions()[1], law);
  if (call.fault != nullptr) return ffi::Error::InvalidArgument(call.fault);
  Team team(pool);
  route(team, call.shape, logits.typed_data(), call.replay, {ids->typed_data(), native->typed_data(), weights->typed_data(), nullptr});
  return ffi::Error::Success();
}

// `block` is returned as `written`, the same memory.
ffi::Error run_recording_router(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> bias,
                                ffi::Buffer<ffi::S32> replay_ids, ffi::Buffer<ffi::PRED> replay_valid, ffi::Buffer<ffi::S32> block,
                                ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::Buffer<ffi::S32>> ids,
                                ffi::Result<ffi::Buffer<ffi::S32>> native, ffi::Result<ffi::Buffer<ffi::F32>> weights,
                                ffi::Result<ffi::Buffer<ffi::S32>> written, int64_t scoring, bool renormalize, float scale, float epsilon,
                                float jitter_eps, int64_t num_groups, int64_t topk_group, int64_t group_score_topk) {
  const RouterLaw law = router_law(scoring, renormalize, scale, epsilon, jitter_eps, num_groups, topk_group, group_score_topk);
  const RouterCall call(logits, bias, replay_ids, replay_valid, ids->dimensions()[1], law);
  if (call.fault != nullptr) return ffi::Error::InvalidArgument(call.fault);
  const int64_t first = layer.typed_data()[0] * call.shape.top_k;
  if (block.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the block of ids was copied");
  if (first < 0 || first + call.shape.top_k > block.dimensions()[0]) return ffi::Error::InvalidArgument("the layer is outside the block");
  Team team(pool);
  int32_t* column = written->typed_data() + first * call.shape.tokens;
  route(team, call.shape, logits.typed_data(), call.replay, {ids->typed_data(), native->typed_data(), weights->typed_data(), column});
  return ffi::Error::Success();
}

}  // namespace rex
