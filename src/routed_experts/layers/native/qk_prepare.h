// Queries, keys and values of a projected row as the layers of families make them: biases, a norm of each head or of the whole projection,
// rotary positions on the first 2F numbers of a head, in halves or in pairs, and heads whose query has a gate beside it. Queries are left
// as floats, keys and values go to the pool. Plain rows (qk_norm_rope.h) take a path of their own, which is faster.
#pragma once
#include "qk_norm_rope.h"

namespace rex {

enum class QkNorm : int64_t { kNone, kHead, kWhole };

struct QkTraits {
  QkNorm norm = QkNorm::kHead;
  float norm_offset = 0;
  int64_t frequencies = 0;  // F; 0: no rotary positions
  bool interleaved = false, gated = false, norm_after_rope = false;
  bool biased = false;  // there is a bias, or the row has it already
};

// A layer's own arrays: norms [C] or [H C] and [G C], the bias of the projection; null where there are none.
template <class T>
struct QkArrays {
  const T *q_norm, *k_norm, *bias;
};

// The factor of a norm over `count` numbers.
inline float inverse_rms(const float* x, int64_t count, float eps) {
  vf squares = {};
  for (int64_t c = 0; c < count; c += kLanes) {
    const vf part = load_upto(x + c, count - c);
    squares += part * part;
  }
  return 1.0f / std::sqrt(sum(squares) / count + eps);
}

// In place, on the first 2F numbers of a head.
inline void rotate_head(const QkTraits& traits, const float* cos, const float* sin, float* x) {
  const int64_t half = traits.frequencies, step = traits.interleaved ? 2 : 1, apart = traits.interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float low = x[i * step], high = x[i * step + apart];
    x[i * step] = low * cos[i] - high * sin[i];
    x[i * step + apart] = high * cos[i] + low * sin[i];
  }
}

// Heads of a row, `apart` numbers from one to the next: each one normalised and rotated, then given to store(head, numbers).
template <class T, class Store>
void prepare_heads(const QkNormRopeShape& s, const QkTraits& traits, const float* row, int64_t heads, int64_t apart, const T* bias,
                   const T* norm, const float* cos, const float* sin, const Store& store_head) {
  thread_local Scratch scratch;
  float* all = scratch.floats(heads * s.dim);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t c = 0; c < s.dim; c += kLanes) {
      vf part = load_upto(row + h * apart + c, s.dim - c);
      if (bias != nullptr) part += load_upto(bias + h * apart + c, s.dim - c);
      store_upto(all + h * s.dim + c, part, s.dim - c);
    }
  const float whole = traits.norm == QkNorm::kWhole ? inverse_rms(all, heads * s.dim, s.eps) : 1.0f;
  for (int64_t h = 0; h < heads; h++) {
    float* head = all + h * s.dim;
    if (traits.norm_after_rope) rotate_head(traits, cos, sin, head);
    const float inverse = traits.norm == QkNorm::kHead ? inverse_rms(head, s.dim, s.eps) : whole;
    const T* scale = norm + (traits.norm == QkNorm::kWhole ? h * s.dim : 0);
    for (int64_t c = 0; traits.norm != QkNorm::kNone && c < s.dim; c += kLanes)
      store_upto(head + c, load_upto(head + c, s.dim - c) * inverse * (load_upto(scale + c, s.dim - c) + traits.norm_offset), s.dim - c);
    if (!traits.norm_after_rope) rotate_head(traits, cos, sin, head);
    store_head(h, head);
  }
}

// Of `in.cos` and `in.sin` the first F of a row are those of the frequencies; the norms of `in` are not read.
template <class T, class P>
void qk_prepare_token(const QkNormRopeShape& s, const QkTraits& traits, const QkArrays<T>& arrays, const QkNormRopeInputs<float, T>& in,
                      int64_t n, float* queries, P* pool) {
  const int64_t step = (traits.gated ? 2 : 1) * s.dim, keys = s.heads * step, values = keys + s.groups * s.dim;
  const float *row = in.qkv + n * (values + s.groups * s.dim), *cos = in.cos + n * s.angles, *sin = in.sin + n * s.angles;
  prepare_heads(s, traits, row, s.heads, step, arrays.bias, arrays.q_norm, cos, sin,
                [&](int64_t h, const float* head) { std::copy_n(head, s.dim, queries + (n * s.heads + h) * s.dim); });
  if (!in.valid[n]) return;
  const int64_t at = in.positions[n], page = s.first_page + in.page_table[in.token_rows[n] * s.pages + at / s.page];
  P* slot = pool + (page * s.page + at % s.page) * 2 * s.groups * s.dim;
  const T* bias = arrays.bias;
  prepare_heads(s, traits, row + keys, s.groups, s.dim, bias == nullptr ? nullptr : bias + keys, arrays.k_norm, cos, sin,
                [&](int64_t g, const float* head) {
                  for (int64_t c = 0; c < s.dim; c += kLanes)
                    store_upto(slot + 2 * g * s.dim + c, unscaled<P>(load_upto(head + c, s.dim - c), s.kv_scales.keys), s.dim - c);
                });
  for (int64_t g = 0; g < s.groups; g++)
    for (int64_t c = 0; c < s.dim; c += kLanes) {
      const int64_t at_row = values + g * s.dim + c, left = s.dim - c;
      vf part = load_upto(row + at_row, left);
      if (bias != nullptr) part += load_upto(bias + at_row, left);
      store_upto(slot + (2 * g + 1) * s.dim + c, unscaled<P>(part, s.kv_scales.values), left);
    }
}

template <class T, class P>
void qk_prepare(Team& team, const QkNormRopeShape& s, const QkTraits& traits, const QkArrays<T>& arrays, const QkNormRopeInputs<float, T>& in,
                float* queries, P* cache) {
  const bool plain = traits.norm == QkNorm::kHead && traits.norm_offset == 0 && 2 * traits.frequencies == s.dim && !traits.interleaved &&
                     !traits.gated && !traits.norm_after_rope && !traits.biased && arrays.bias == nullptr;
  if (plain) {
    QkNormRopeInputs<float, T> own = in;
    own.q_norm = arrays.q_norm, own.k_norm = arrays.k_norm;
    return qk_norm_rope(team, s, own, queries, cache);
  }
  each_block(team, s.tokens, kQkNormRopeTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) qk_prepare_token(s, traits, arrays, in, n, queries, cache);
  });
}

// Values of gated heads, in place, times the sigmoid of their gates, which are beside the queries in the projected row.
template <class T>
void gate_heads(Team& team, const QkNormRopeShape& s, const float* qkv, const T* bias, float* mixed) {
  const int64_t width = (2 * s.heads + 2 * s.groups) * s.dim;
  each_block(team, s.tokens, kQkNormRopeTokens, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * s.heads; i < end * s.heads; i++)
      for (int64_t c = 0; c < s.dim; c += kLanes) {
        const int64_t at = (2 * (i % s.heads) + 1) * s.dim + c, left = s.dim - c;
        vf gate = load_upto(qkv + i / s.heads * width + at, left);
        if (bias != nullptr) gate += load_upto(bias + at, left);
        store_upto(mixed + i * s.dim + c, load_upto(mixed + i * s.dim + c, left) / (1.0f + exp(-gate)), left);
      }
  });
}

}  // namespace rex
