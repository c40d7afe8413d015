// Latent attention between its projections (models/decoder/latent_attention.py): a token's row is normalised, rotated and written to the
// pool; queries are mapped into the space of the rows, attend there, and what they mix is mapped to values. Numbers stay float32 from the
// projected rows to the result; what is written has the pool's dtype. Rows of all tokens are written first; then blocks of tokens are mapped,
// attend and are mapped back, so that scratch has one size for any step.
#pragma once
#include "attention.h"

namespace rex {

constexpr int64_t kLatentTokens = 16;   // of a piece of work
constexpr int64_t kAbsorbColumns = 64;  // of a row, mapped at once
constexpr int64_t kAbsorbRows = 256;    // tokens of a piece
constexpr int64_t kLatentFloats = 1 << 23;  // of a block's scratch: 32 MiB, or that of kLatentTokens tokens

struct LatentShape {
  int64_t tokens, heads, rank, key_dim, value_dim, rotary, pages, page, row, first_page;
  bool interleaved;
  float eps;
  int64_t query() const { return key_dim + rotary; }
  int64_t width() const { return rank + rotary; }
  int64_t up() const { return heads * (key_dim + value_dim); }  // from a row of the expanding matrix to the next
  int64_t token_floats() const { return heads * (query() + width() + rank); }
  int64_t block() const { return std::min(tokens, std::max(kLatentTokens, kLatentFloats / token_floats())); }
};

template <class X, class T>
struct LatentInputs {
  const X *queries, *compressed;  // [N, H, K + P], [N, R + P]
  const T *norm, *up;             // [R], [R, H (K + V)]
  const float *cos, *sin;                     // [N, P / 2]
  const int32_t *positions, *token_rows, *page_table;
  const bool* valid;
};

// `count` numbers, half of them frequencies: pairs are neighbours, or half of the numbers apart.
template <class X, class Out>
inline void rotate(const X* x, const float* cos, const float* sin, int64_t count, bool interleaved, Out* out) {
  const int64_t half = count / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; i++) {
    const float low = number(x[i * step]), high = number(x[i * step + apart]);
    put(out + i * step, low * cos[i] - high * sin[i]);
    put(out + i * step + apart, high * cos[i] + low * sin[i]);
  }
}

// A token's row into its slot.
template <class X, class T, class P>
void write_latent_row(const LatentShape& s, const LatentInputs<X, T>& in, int64_t n, P* pool) {
  if (!in.valid[n]) return;
  const X* row = in.compressed + n * s.width();
  const int64_t at = in.positions[n], page = s.first_page + in.page_table[in.token_rows[n] * s.pages + at / s.page];
  P* slot = pool + (page * s.page + at % s.page) * s.row;
  vf squares = {};
  for (int64_t c = 0; c < s.rank; c += kLanes) {
    const vf part = load_upto(row + c, s.rank - c);
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / s.rank + s.eps);
  for (int64_t c = 0; c < s.rank; c += kLanes)
    store_upto(slot + c, load_upto(row + c, s.rank - c) * inverse * load_upto(in.norm + c, s.rank - c), s.rank - c);
  rotate(row + s.rank, in.cos + n * s.rotary / 2, in.sin + n * s.rotary / 2, s.rotary, s.interleaved, slot + s.rank);
}

// The queries of tokens first.. as floats, and their rotated parts behind where the others will be: `wide` and `queries` begin at `first`.
template <class X, class T>
void widen_queries(Team& team, const LatentShape& s, const LatentInputs<X, T>& in, int64_t first, int64_t count, float* wide, float* queries) {
  each_block(team, count, kLatentTokens, [&](int64_t begin, int64_t end) {
    const X* from = in.queries + first * s.heads * s.query();
    convert(from + begin * s.heads * s.query(), wide + begin * s.heads * s.query(), (end - begin) * s.heads * s.query());
    for (int64_t i = begin * s.heads; i < end * s.heads; i++) {
      const int64_t angles = (first + i / s.heads) * s.rotary / 2;
      rotate(from + i * s.query() + s.key_dim, in.cos + angles, in.sin + angles, s.rotary, s.interleaved, queries + i * s.width() + s.rank);
    }
  });
}

// Tokens begin..end-1 of a block, of one head: columns c.. of their queries in the space of the rows. The matrix has these as rows: they are transposed.
template <class X, class T>
void absorb(const LatentShape& s, const LatentInputs<X, T>& in, const float* wide, int64_t head, int64_t c, int64_t begin, int64_t end, float* queries) {
  thread_local Scratch scratch;
  const int64_t count = std::min(kAbsorbColumns, s.rank - c), padded = (count + kLanes - 1) / kLanes * kLanes;
  float* panel = scratch.floats(s.key_dim * padded);
  const T* from = in.up + c * s.up() + head * (s.key_dim + s.value_dim);
  for (int64_t r = 0; r < padded; r += kLanes)
    for (int64_t k = 0; k < s.key_dim; k += kLanes) {
      const int width = std::min<int64_t>(kLanes, s.key_dim - k);
      vf square[kLanes];
      for (int64_t i = 0; i < kLanes; i++) square[i] = load_upto(from + std::min(r + i, count - 1) * s.up() + k, width);
      transpose(square);
      for (int i = 0; i < width; i++) store(panel + (k + i) * padded + r, square[i]);
    }
  gemm_in_cache(end - begin, wide + (begin * s.heads + head) * s.query(), s.heads * s.query(), panel, padded, s.key_dim, count,
                queries + (begin * s.heads + head) * s.width() + c, s.heads * s.width(), true);
}

// The values of a block's tokens, whose first one is `out`'s.
template <class X, class T>
void expand(Team& team, const LatentShape& s, const LatentInputs<X, T>& in, int64_t count, const float* mixed, X* out) {
  const int64_t down = (count + kAbsorbRows - 1) / kAbsorbRows;
  team.each(s.heads * down, [&](int64_t i) {
    thread_local Scratch own;
    const int64_t head = i % s.heads, begin = i / s.heads * kAbsorbRows, end = std::min(count, begin + kAbsorbRows), ld = s.value_dim + kPad;
    float* values = own.floats((end - begin) * ld);
    const T* up = in.up + head * (s.key_dim + s.value_dim) + s.key_dim;
    gemm(end - begin, mixed + (begin * s.heads + head) * s.rank, s.heads * s.rank, up, s.up(), s.rank, s.value_dim, values, ld, true);
    for (int64_t n = begin; n < end; n++) convert(values + (n - begin) * ld, out + (n * s.heads + head) * s.value_dim, s.value_dim);
  });
}

// `out` [N, H, V].
template <class X, class T, class P>
void latent_attention(Team& team, const LatentShape& s, AttentionShape attention_shape, const PagedStep& step, const LatentInputs<X, T>& in,
                      Scratch& scratch, P* pool, X* out) {
  const int64_t most = s.block(), across = (s.rank + kAbsorbColumns - 1) / kAbsorbColumns;
  float* wide = scratch.floats(most * s.token_floats());
  float *queries = wide + most * s.heads * s.query(), *mixed = queries + most * s.heads * s.width();
  each_block(team, s.tokens, kLatentTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) write_latent_row(s, in, n, pool);
  });
  std::vector<int32_t> starts(attention_shape.requests + 1);
  for (int64_t first = 0; first < s.tokens; first += most) {
    const int64_t count = std::min(most, s.tokens - first), down = (count + kAbsorbRows - 1) / kAbsorbRows;
    widen_queries(team, s, in, first, count, wide, queries);
    team.each(s.heads * across * down, [&](int64_t i) {
      const int64_t begin = i / across / s.heads * kAbsorbRows;
      absorb(s, in, wide, i / across % s.heads, i % across * kAbsorbColumns, begin, std::min(count, begin + kAbsorbRows), queries);
    });
    for (size_t b = 0; b < starts.size(); b++) starts[b] = std::clamp<int64_t>(step.query_starts[b] - first, 0, count);
    attention_shape.tokens = count;
    attention(team, attention_shape, PagedStep{step.positions + first, starts.data(), step.page_table, step.first_page}, queries, pool, mixed);
    expand(team, s, in, count, mixed, out + first * s.heads * s.value_dim);
  }
}

}  // namespace rex
