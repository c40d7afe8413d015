// Softmax over E, the best K with ties to the lower id, and their weights (Qwen3's routing): one pass a token. The ids go to the
// experts and into the step's block [M*K, N], which is written in place. Rows to replay are taken as they are.
#pragma once
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int64_t kRouterTokens = 64;  // of a piece of work

struct RouterShape {
  int64_t tokens, experts, top_k;
  bool renormalize;
  int64_t stride;  // from a row of the block to the next
};

// Experts [N, K] that tokens run in place of their router's choice, where `valid`; null: none. Ids of such rows are in range.
struct ReplayRows {
  const int32_t* ids = nullptr;
  const bool* valid = nullptr;
  bool has(int64_t n) const { return ids != nullptr && valid[n]; }
};

// scores = softmax(logits), in float32; a row with NaN is NaN throughout.
inline void softmax(const float* logits, float* scores, int64_t count) {
  float top = logits[0];
  for (int64_t e = 1; e < count; e++) top = logits[e] > top || std::isnan(logits[e]) ? logits[e] : top;
  float total = 0;
  for (int64_t e = 0; e < count; e += kLanes) {
    const int lanes = std::min<int64_t>(kLanes, count - e);
    const vf weights = exp(load(logits + e, lanes) - top);
    for (int i = 0; i < lanes; i++) total += weights[i];
    store(scores + e, weights, lanes);
  }
  for (int64_t e = 0; e < count; e++) scores[e] /= total;
}

// The `top_k` highest of `scores`, which are spent.
inline void select_top_k(float* scores, int64_t experts, int64_t top_k, int32_t* ids, float* weights) {
  for (int64_t k = 0; k < top_k; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++)
      if (scores[e] >= 0 && (best < 0 || scores[e] > scores[best])) best = e;
    if (best < 0) best = std::min(k, experts - 1);  // NaN: the order of ids, as a sort of equals gives it
    ids[k] = best, weights[k] = scores[best];
    if (!std::isnan(scores[best])) scores[best] = -1;
  }
}

inline void route_token(const RouterShape& s, int64_t n, const float* logits, ReplayRows replay, int32_t* ids, float* weights,
                        int32_t* block) {
  thread_local Scratch scratch;
  float *scores = scratch.floats(s.experts + s.top_k), *gathered = scores + s.experts;
  const float* row = logits + n * s.experts;
  int32_t* chosen = ids + n * s.top_k;
  softmax(row, scores, s.experts);
  if (!replay.has(n)) select_top_k(scores, s.experts, s.top_k, chosen, weights + n * s.top_k);
  for (int64_t k = 0; replay.has(n) && k < s.top_k; k++) {
    chosen[k] = replay.ids[n * s.top_k + k];
    weights[n * s.top_k + k] = scores[chosen[k]];
  }
  for (int64_t k = 0; k < s.top_k; k++) gathered[k] = row[chosen[k]];
  if (s.renormalize) softmax(gathered, weights + n * s.top_k, s.top_k);
  for (int64_t k = 0; block != nullptr && k < s.top_k; k++) block[k * s.stride + n] = chosen[k];
}

inline void route(Team& team, const RouterShape& s, const float* logits, ReplayRows replay, int32_t* ids, float* weights, int32_t* block) {
  each_block(team, s.tokens, kRouterTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) route_token(s, n, logits, replay, ids, weights, block);
  });
}

}  // namespace rex
