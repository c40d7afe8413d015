// From a projected row to rotated queries, and to keys and values in their slots of the pool, written in place. Queries and keys are
// normalised a head at a time and rotated by position (half-split rotary form), and rounded to the dtype of the projected row where
// the plain code rounds. Padding tokens write nothing.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace rex {

constexpr int64_t kQkNormRopeTokens = 16;  // of a piece of work

struct QkNormRopeShape {
  int64_t tokens, heads, groups, dim, pages, page, first_page, layer;
  float eps;
  int64_t angles;  // numbers of a row of cosines: C, or C / 2 where the second half would repeat the first
  KvScales kv_scales{};
  int64_t second() const { return angles == dim ? dim / 2 : 0; }
};

template <class X, class T>
struct QkNormRopeInputs {
  const X* qkv;
  const T *q_norm, *k_norm;
  const float *cos, *sin;
  const int32_t *positions, *token_rows, *page_table;
  const bool* valid;
};

// What is stored as a code: a number divided by the scale of its layer. Other pools have no scales.
template <class Out>
inline vf unscaled(vf v, float kv_scale) {
  if constexpr (std::is_same_v<Out, kv8>) return kv_scale == 1.0f ? v : v / kv_scale;
  return v;
}

// Norm and rotary of one head, divided by `kv_scale` where codes are stored.
template <class X, class T, class Out>
void norm_and_rotate(const QkNormRopeShape& s, const X* head, const T* scale, const float* cos, const float* sin, Out* out, float kv_scale = 1) {
  vf squares = {};
  for (int64_t c = 0; c < s.dim; c += kLanes) {
    const vf part = load_upto(head + c, s.dim - c);
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / s.dim + s.eps);
  const int64_t half = s.dim / 2;
  for (int64_t c = 0; c < half; c += kLanes) {
    const int64_t left = half - c;
    auto normed = [&](int64_t at) { return rounded<X>(rounded<X>(load_upto(head + at, left) * inverse) * load_upto(scale + at, left)); };
    auto rotated = [&](vf a, vf b) { return unscaled<Out>(rounded<X>(a + b), kv_scale); };
    const vf low = normed(c), high = normed(c + half);
    store_upto(out + c, rotated(low * load_upto(cos + c, left), -(high * load_upto(sin + c, left))), left);
    store_upto(out + c + half, rotated(high * load_upto(cos + c + s.second(), left), low * load_upto(sin + c + s.second(), left)), left);
  }
}

template <class X, class T, class P>
void qk_norm_rope_token(const QkNormRopeShape& s, const QkNormRopeInputs<X, T>& in, int64_t n, X* queries, P* pool) {
  const X* row = in.qkv + n * (s.heads + 2 * s.groups) * s.dim;
  const float *cos = in.cos + n * s.angles, *sin = in.sin + n * s.angles;
  for (int64_t h = 0; h < s.heads; h++)
    norm_and_rotate(s, row + h * s.dim, in.q_norm + s.layer * s.dim, cos, sin, queries + (n * s.heads + h) * s.dim);
  if (!in.valid[n]) return;
  const int64_t at = in.positions[n], page = s.first_page + in.page_table[in.token_rows[n] * s.pages + at / s.page];
  P* slot = pool + (page * s.page + at % s.page) * 2 * s.groups * s.dim;
  for (int64_t g = 0; g < s.groups; g++) {
    norm_and_rotate(s, row + (s.heads + g) * s.dim, in.k_norm + s.layer * s.dim, cos, sin, slot + 2 * g * s.dim, s.kv_scales.keys);
    const X* values = row + (s.heads + s.groups + g) * s.dim;
    for (int64_t c = 0; c < s.dim; c += kLanes)
      store_upto(slot + (2 * g + 1) * s.dim + c, unscaled<P>(load_upto(values + c, s.dim - c), s.kv_scales.values), s.dim - c);
  }
}

template <class X, class T, class P>
void qk_norm_rope(Team& team, const QkNormRopeShape& s, const QkNormRopeInputs<X, T>& in, X* queries, P* cache) {
  each_block(team, s.tokens, kQkNormRopeTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) qk_norm_rope_token(s, in, n, queries, cache);
  });
}

}  // namespace rex
