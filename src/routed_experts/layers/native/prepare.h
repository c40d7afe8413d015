// From a projected row to turned queries, and to keys and values in their slots of the pool, which is written where it lies.
// Queries and keys are normalised a head at a time and turned by their position (half-split rotary form), and rounded to the dtype of
// the projected row where the plain code rounds. Padding tokens write nothing.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace rex {

constexpr int64_t kPrepareTokens = 16;  // of a piece of work

struct PrepareShape {
  int64_t tokens, heads, groups, dim, pages, page, first_page, layer;
  float eps;
};

template <class X, class T>
struct PrepareInputs {
  const X* qkv;
  const T *q_norm, *k_norm;
  const float *cos, *sin;
  const int32_t *positions, *token_rows, *page_table;
  const bool* valid;
};

template <class T>
inline void round_to(float* values, int64_t count) {
  if constexpr (!std::is_same_v<T, float>) {
    T narrow[kLanes];
    for (int64_t i = 0; i < count; i += kLanes) {
      const int lanes = std::min<int64_t>(kLanes, count - i);
      store(narrow, load(values + i, lanes));
      store(values + i, load(narrow), lanes);
    }
  }
}

// Norm and rotary of one head, in `line` of C floats.
template <class X, class T>
void turn(const PrepareShape& s, const X* head, const T* scale, const float* cos, const float* sin, float* line, float* spare) {
  convert(head, line, s.dim);
  vf squares = {};
  for (int64_t c = 0; c < s.dim; c += kLanes) {
    const vf part = c + kLanes <= s.dim ? load(line + c) : load(line + c, s.dim - c);
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / s.dim + s.eps);
  for (int64_t c = 0; c < s.dim; c++) line[c] *= inverse;
  round_to<X>(line, s.dim);
  convert(scale, spare, s.dim);
  for (int64_t c = 0; c < s.dim; c++) line[c] *= spare[c];
  round_to<X>(line, s.dim);
  const int64_t half = s.dim / 2;
  int64_t c = 0;
  for (; c + kLanes <= half; c += kLanes) {
    const vf low = load(line + c), high = load(line + c + half);
    store(line + c, low * load(cos + c) - high * load(sin + c));
    store(line + c + half, high * load(cos + c + half) + low * load(sin + c + half));
  }
  for (; c < half; c++) {
    const float low = line[c], high = line[c + half];
    line[c] = low * cos[c] - high * sin[c];
    line[c + half] = high * cos[c + half] + low * sin[c + half];
  }
  round_to<X>(line, s.dim);
}

template <class X, class T, class P>
void prepare_token(const PrepareShape& s, const PrepareInputs<X, T>& in, int64_t n, X* queries, P* pool) {
  thread_local Scratch scratch;
  float *line = scratch.floats(2 * s.dim), *spare = line + s.dim;
  const X* row = in.qkv + n * (s.heads + 2 * s.groups) * s.dim;
  const float *cos = in.cos + n * s.dim, *sin = in.sin + n * s.dim;
  for (int64_t h = 0; h < s.heads; h++) {
    turn(s, row + h * s.dim, in.q_norm + s.layer * s.dim, cos, sin, line, spare);
    convert(line, queries + (n * s.heads + h) * s.dim, s.dim);
  }
  if (!in.valid[n]) return;
  const int64_t at = in.positions[n], page = s.first_page + in.page_table[in.token_rows[n] * s.pages + at / s.page];
  P* slot = pool + (page * s.page + at % s.page) * 2 * s.groups * s.dim;
  for (int64_t g = 0; g < s.groups; g++) {
    turn(s, row + (s.heads + g) * s.dim, in.k_norm + s.layer * s.dim, cos, sin, line, spare);
    convert(line, slot + 2 * g * s.dim, s.dim);
    convert(row + (s.heads + s.groups + g) * s.dim, line, s.dim);
    convert(line, slot + (2 * g + 1) * s.dim, s.dim);
  }
}

template <class X, class T, class P>
void prepare(Team& team, const PrepareShape& s, const PrepareInputs<X, T>& in, X* queries, P* cache) {
  each_block(team, s.tokens, kPrepareTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) prepare_token(s, in, n, queries, cache);
  });
}

}  // namespace rex
