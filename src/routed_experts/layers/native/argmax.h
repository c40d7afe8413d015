// The best token of each row of scores, and its logprob: two passes over a row that stays in cache.
#pragma once
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace rex {

// Scores v.., padded with `beyond`.
inline vf row_part(const float* scores, int64_t v, int64_t vocabulary, float beyond) {
  if (v + kLanes <= vocabulary) return load(scores + v);
  vf part = load(scores + v, vocabulary - v);
  for (int i = vocabulary - v; i < kLanes; i++) part[i] = beyond;
  return part;
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
  vf totals = {};
  for (int64_t v = 0; v < vocabulary; v += kLanes) totals += exp(row_part(scores, v, vocabulary, -INFINITY) - top);
  *token = is_broken ? vocabulary - 1 : best;
  *logprob = is_broken ? NAN : scores[*token] - top - std::log(sum(totals));
}

inline void argmax_tokens(Team& team, int64_t rows, int64_t vocabulary, const float* scores, int32_t* tokens, float* logprobs) {
  team.each(rows, [&](int64_t b) { argmax_row(scores + b * vocabulary, vocabulary, tokens + b, logprobs + b); });
}

}  // namespace rex
