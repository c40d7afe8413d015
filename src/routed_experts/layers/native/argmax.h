// Of each row of scores: the best token, and the logprobs of tokens. Passes over a row that stays in cache. All logprobs have one normaliser,
// whose sums run in one order: a token's bits depend on its row alone, and not on the kernel.
#pragma once
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int kExpSums = 4;  // side by side
constexpr int64_t kExpBlock = 16 * kExpSums * kLanes;  // scores, whose sum is added to the sum of all as one number: few roundings in a row

// Scores v.., padded with `beyond`.
inline vf row_part(const float* scores, int64_t v, int64_t vocabulary, float beyond) {
  if (v + kLanes <= vocabulary) return load(scores + v);
  vf part = load(scores + v, vocabulary - v);
  for (int i = vocabulary - v; i < kLanes; i++) part[i] = beyond;
  return part;
}

// log(sum(exp(scores))) is top + log_sum, in two parts: their sum would round what a large score and a small logprob leave.
struct Normaliser {
  float top, log_sum;
  float logprob(float score) const { return score - top - log_sum; }
};

// `top`: the highest score. Not inlined: one piece of machine code rounds for all callers.
[[gnu::noinline]] inline Normaliser normaliser(const float* scores, int64_t vocabulary, float top) {
  vf total = {};
  for (int64_t begin = 0; begin < vocabulary; begin += kExpBlock) {
    const int64_t end = std::min(vocabulary, begin + kExpBlock);
    vf sums[kExpSums] = {};
    int64_t v = begin;
    for (; v + kExpSums * kLanes <= end; v += kExpSums * kLanes)
      for (int i = 0; i < kExpSums; i++) sums[i] += exp(load(scores + v + i * kLanes) - top);
    for (; v < end; v += kLanes) sums[0] += exp(row_part(scores, v, end, -INFINITY) - top);
    total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  return {top, std::log(sum(total))};
}

inline float highest(const float* scores, int64_t vocabulary) {
  vf tops = vf{} - INFINITY;
  for (int64_t v = 0; v < vocabulary; v += kLanes) {
    const vf part = row_part(scores, v, vocabulary, -INFINITY);
    tops = part > tops ? part : tops;
  }
  return largest(tops);
}

// Equal scores go to the lower id. A row with NaN gives its last id, as the array code does, and a logprob of NaN.
inline void argmax_row(const float* scores, int64_t vocabulary, int32_t* token, float* logprob) {
  vf tops = vf{} - INFINITY;
  vi lanes, places = {}, broken = {};
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  for (int64_t v = 0; v < vocabulary; v += kLanes) {
    const vf part = row_part(scores, v, vocabulary, -INFINITY);
    const vi higher = part > tops;  // strictly: the first of equals stays
    tops = higher ? part : tops;
    places = higher ? lanes + static_cast<int32_t>(v) : places;
    broken |= part != part;
  }
  float top = -INFINITY;
  int32_t best = 0;
  bool is_broken = false;
  for (int i = 0; i < kLanes; i++) {
    is_broken |= broken[i] != 0;
    if (tops[i] > top || (tops[i] == top && places[i] < best)) top = tops[i], best = places[i];
  }
  *token = is_broken ? vocabulary - 1 : best;
  *logprob = is_broken ? NAN : normaliser(scores, vocabulary, top).logprob(scores[*token]);
}

inline void argmax_tokens(Team& team, int64_t rows, int64_t vocabulary, const float* scores, int32_t* tokens, float* logprobs) {
  team.each(rows, [&](int64_t b) { argmax_row(scores + b * vocabulary, vocabulary, tokens + b, logprobs + b); });
}

// Of `count` tokens a row; ids outside the vocabulary are clipped. A row with NaN gives NaN: the sum holds it.
inline void token_logprobs(Team& team, int64_t rows, int64_t vocabulary, int64_t count, const float* scores, const int32_t* tokens,
                           float* logprobs) {
  team.each(rows, [&](int64_t b) {
    const float* row = scores + b * vocabulary;
    const Normaliser all = normaliser(row, vocabulary, highest(row, vocabulary));
    for (int64_t i = b * count; i < (b + 1) * count; i++) logprobs[i] = all.logprob(row[std::clamp<int64_t>(tokens[i], 0, vocabulary - 1)]);
  });
}

}  // namespace rex
