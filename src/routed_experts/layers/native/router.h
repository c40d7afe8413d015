// The experts of a token and their weights, by every law of layers/routing.py: scores, a bias that moves the choice alone, the best groups,
// the best K with ties to the lower id, weights. One pass a token. The ids go to the experts and into the step's block [M*K, N], which is
// written in place. Rows to replay are taken as they are.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int64_t kRouterTokens = 64;  // of a piece of work
constexpr float kLowest = -std::numeric_limits<float>::infinity();

enum class Scoring : int64_t { kSoftmax, kSigmoid, kLogits, kSparseMixer };  // in the order of SCORING_FUNCS

struct RouterLaw {
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = false;
  float scale = 1, epsilon = 0, jitter_eps = 0;
  int64_t num_groups = 1, topk_group = 1, group_score_topk = 1;
  const float* bias = nullptr;  // [E], of the choice, or null
  bool by_logits() const { return scoring == Scoring::kLogits || (scoring == Scoring::kSoftmax && renormalize); }
};

struct RouterShape {
  int64_t tokens, experts, top_k;
  RouterLaw law;
  int64_t stride;  // from a row of the block to the next
};

// Experts [N, K] that tokens run in place of their router's choice, where `valid`; null: none. Ids of such rows are in range.
struct ReplayRows {
  const int32_t* ids = nullptr;
  const bool* valid = nullptr;
  bool has(int64_t n) const { return ids != nullptr && valid[n]; }
};

// What a router gives: `native` [N, K], its own choice, or null; `block`: a layer's rows of the step's block, or null.
struct RouterOutput {
  int32_t *ids, *native;
  float* weights;
  int32_t* block;
  float* weights_block = nullptr;
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

inline void sigmoid(const float* logits, float* scores, int64_t count) {
  for (int64_t e = 0; e < count; e += kLanes) store_upto(scores + e, 1.0f / (1.0f + exp(-load_upto(logits + e, count - e))), count - e);
}

// Whether score a goes before b, which has a lower id: NaN goes before all numbers, as a sort has it.
inline bool goes_before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The `count` best of `scores`, in order; equal ones in the order of their ids. `keys`: space for so many, in whole vectors.
inline void best_of(const float* scores, int64_t experts, int64_t count, int32_t* keys, int32_t* ids) {
  constexpr int32_t kTaken = std::numeric_limits<int32_t>::min();
  for (int64_t e = 0; e < experts; e += kLanes) {
    const vf part = load_upto(scores + e, experts - e) + 0.0f;  // -0 is 0
    const vi bits = (vi)part, ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    const vi key = part == part ? ordered : vi{} + 0x7fffffff, known = first_lanes(experts - e) ? key : vi{} + kTaken;
    std::memcpy(keys + e, &known, sizeof(known));
  }
  for (int64_t k = 0; k < count; k++) {
    vi most = read<vi>(keys);
    for (int64_t e = kLanes; e < experts; e += kLanes) {
      const vi part = read<vi>(keys + e);
      most = part > most ? part : most;
    }
    int32_t highest = kTaken;
    for (int i = 0; i < kLanes; i++) highest = std::max(highest, most[i]);
    int64_t best = 0;
    while (keys[best] != highest) best++;
    keys[best] = kTaken, ids[k] = best;
  }
}

// One thread's space for a token.
struct RouterScratch {
  Scratch floats, numbers;
  float *scores, *choice, *ranks, *gathered;
  int32_t *keys, *best;
  void fit(const RouterShape& s) {
    const int64_t most = std::max(s.experts, s.top_k) + kLanes;
    scores = floats.floats(4 * most), choice = scores + most, ranks = choice + most, gathered = ranks + most;
    keys = numbers.take<int32_t>(2 * most), best = keys + most;
  }
};

// Put the choices of all but the best groups at -inf.
inline void keep_groups(const RouterShape& s, RouterScratch& a) {
  const int64_t size = s.experts / s.law.num_groups;
  for (int64_t group = 0; group < s.law.num_groups; group++) {
    best_of(a.choice + group * size, size, s.law.group_score_topk, a.keys, a.best);
    a.ranks[group] = 0;
    for (int64_t k = 0; k < s.law.group_score_topk; k++) a.ranks[group] += a.choice[group * size + a.best[k]];
  }
  best_of(a.ranks, s.law.num_groups, s.law.topk_group, a.keys, a.best);
  std::sort(a.best, a.best + s.law.topk_group);
  for (int64_t group = 0, kept = 0; group < s.law.num_groups; group++) {
    if (kept < s.law.topk_group && a.best[kept] == group) kept++; else std::fill_n(a.choice + group * size, size, kLowest);
  }
}

inline void choose(const RouterShape& s, const float* logits, RouterScratch& a, int32_t* ids) {
  if (s.law.scoring == Scoring::kSoftmax) softmax(logits, a.scores, s.experts);
  else if (s.law.scoring == Scoring::kSigmoid) sigmoid(logits, a.scores, s.experts);
  else std::copy_n(logits, s.experts, a.scores);
  for (int64_t e = 0; e < s.experts; e++) a.choice[e] = s.law.bias == nullptr ? a.scores[e] : a.scores[e] + s.law.bias[e];
  if (s.law.num_groups != s.law.topk_group) keep_groups(s, a);
  best_of(a.choice, s.experts, s.top_k, a.keys, ids);
}

// Slot k: softmax over the logits, not taken by an earlier slot, that are near the best of them.
inline void sparsemixer(const RouterShape& s, const float* logits, RouterScratch& a, const int32_t* ids, float* weights) {
  std::copy_n(logits, s.experts, a.choice);
  for (int64_t k = 0; k < s.top_k; k++) {
    float best = a.choice[0];
    for (int64_t e = 1; e < s.experts; e++) best = goes_before(a.choice[e], best) ? a.choice[e] : best;
    for (int64_t e = 0; e < s.experts; e++) {
      const bool far = (best - logits[e]) / std::max(std::abs(logits[e]), best) > 2 * s.law.jitter_eps;
      a.ranks[e] = far && e != ids[k] ? kLowest : a.choice[e];
    }
    softmax(a.ranks, a.ranks, s.experts);
    weights[k] = a.ranks[ids[k]];
    a.choice[ids[k]] = kLowest;
  }
}

inline void weigh_experts(const RouterShape& s, const float* logits, RouterScratch& a, const int32_t* ids, float* weights) {
  const float* from = s.law.by_logits() ? logits : a.scores;
  if (s.law.scoring == Scoring::kSparseMixer) {
    sparsemixer(s, logits, a, ids, weights);
  } else if (s.law.by_logits()) {
    for (int64_t k = 0; k < s.top_k; k++) a.gathered[k] = from[ids[k]];
    softmax(a.gathered, weights, s.top_k);
  } else {
    float total = s.law.renormalize ? 0.0f : 1.0f;
    for (int64_t k = 0; k < s.top_k; k++) weights[k] = from[ids[k]];
    for (int64_t k = 0; s.law.renormalize && k < s.top_k; k++) total += weights[k];
    for (int64_t k = 0; s.law.renormalize && k < s.top_k; k++) weights[k] /= total + s.law.epsilon;
  }
  for (int64_t k = 0; s.law.scale != 1.0f && k < s.top_k; k++) weights[k] *= s.law.scale;
}

inline void route_token(const RouterShape& s, int64_t n, const float* logits, ReplayRows replay, RouterScratch& a, const RouterOutput& out) {
  const float* row = logits + n * s.experts;
  int32_t* chosen = out.ids + n * s.top_k;
  choose(s, row, a, chosen);
  if (out.native != nullptr) std::copy_n(chosen, s.top_k, out.native + n * s.top_k);
  if (replay.has(n)) std::copy_n(replay.ids + n * s.top_k, s.top_k, chosen);
  weigh_experts(s, row, a, chosen, out.weights + n * s.top_k);
  for (int64_t k = 0; out.block != nullptr && k < s.top_k; k++) out.block[k * s.stride + n] = chosen[k];
  for (int64_t k = 0; out.weights_block != nullptr && k < s.top_k; k++) out.weights_block[k * s.stride + n] = out.weights[n * s.top_k + k];
}

inline void route(Team& team, const RouterShape& s, const float* logits, ReplayRows replay, const RouterOutput& out) {
  each_block(team, s.tokens, kRouterTokens, [&](int64_t begin, int64_t end) {
    thread_local RouterScratch scratch;
    scratch.fit(s);
    for (int64_t n = begin; n < end; n++) route_token(s, n, logits, replay, scratch, out);
  });
}

}  // namespace rex
