// Scores and weighted sums of values in floats, for queries of any dtype and numbers of the pool as floats.
#pragma once
#include "attention_shape.h"

namespace rex {

// Count numbers of kLanes lines from `at` on, transposed: vector i holds number at + i of each.
template <int Count, class T>
inline void turn(const T* const* lines, int64_t at, int count, vf (&square)[kLanes]) {
  for (int i = 0; i < kLanes; i++) square[i] = Count == kLanes ? load(lines[i] + at) : load(lines[i] + at, count);
  transpose(square);
}

// Queries times numbers c.. of kLanes keys of a kv head: Count of them, or where that is 0 the last ones of a row.
template <int Count, class T>
inline void score_square(const AttentionShape& s, const float* queries, int64_t rows, int64_t c, const T* const* lines, int64_t offset,
                         float* scores) {
  const int count = Count ? Count : s.dim - c;
  vf square[kLanes];
  turn<Count>(lines, offset + c, count, square);
  for (int64_t r = 0; r < rows; r++) {
    const float* q = queries + r * s.dim + c;
    vf sums = c == 0 ? vf{} : load(scores + r * kKeys);
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) sums = add_product(sums, q + i, square[i]);
    store(scores + r * kKeys, sums);
  }
}

// `dim` numbers of the values of a block, in place, times the weights of Rows rows of one kv head, Vectors vectors of columns: sums stay in registers.
template <int Rows, int Vectors, class T>
inline void blend_columns(int64_t dim, const float* weights, int64_t offset, int64_t keys, const T* const* slots, float* mixed) {
  vf sums[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) sums[r][v] = load(mixed + r * dim + v * kLanes);
  for (int64_t t = 0; t < keys; t++) {
    vf lines[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) lines[v] = load(slots[t] + offset + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) sums[r][v] += weights[r * kKeys + t] * lines[v];
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(mixed + r * dim + v * kLanes, sums[r][v]);
}

template <int Rows, class T>
inline void blend_rows(int64_t dim, const float* weights, int64_t offset, int64_t keys, const T* const* slots, float* mixed) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= dim; c += 4 * kLanes) blend_columns<Rows, 4>(dim, weights, offset + c, keys, slots, mixed + c);
  for (; c + kLanes <= dim; c += kLanes) blend_columns<Rows, 1>(dim, weights, offset + c, keys, slots, mixed + c);
  if (const int rest = dim - c)
    for (int r = 0; r < Rows; r++) {
      vf sums = load(mixed + r * dim + c, rest);
      for (int64_t t = 0; t < keys; t++) sums += weights[r * kKeys + t] * load(slots[t] + offset + c, rest);
      store(mixed + r * dim + c, sums, rest);
    }
}

// Products of queries and keys, and of weights and values, in floats. `few`: rows of a piece that read slots in place; `many`: rows of one kv
// head, for which a block is laid out.
struct InFloats {
  using Weight = float;  // what weights are rounded to
  struct Mode {};        // of the processor, while a piece attends
  void prepare(const AttentionShape&, Mix&, int64_t, int64_t) {}

  // Queries times keys, for all kv heads of a piece. The sums are bitwise those of `mix_many`: the number of tokens of a request in a step must
  // not change a row's result. A slot is touched from end to end before its keys are used: hardware prefetchers follow sequential reads, not
  // reads that skip the values.
  template <class T>
  void score_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, Range keys, const T* const* slots) {
    for (int64_t t = keys.first_lane(); t < keys.end; t += kLanes) {
      const T* lines[kLanes];
      key_lines(t, keys.end, slots, lines);
      for (const T* line : lines) touch(line, s.width(groups));
      for (int64_t g = 0; g < groups; g++) {
        const float* queries = mix.queries + g * rows * s.dim;
        float* scores = mix.scores + g * rows * kKeys + t;
        int64_t c = 0;
        for (; c + kLanes <= s.dim; c += kLanes) score_square<kLanes>(s, queries, rows, c, lines, 2 * g * s.row, scores);
        if (c < s.dim) score_square<0>(s, queries, rows, c, lines, 2 * g * s.row, scores);
      }
    }
  }

  // Weights times values in place, for all kv heads of a piece; the sums, too, are those of `mix_many`. Each token's rows meet what it sees
  // and no more: the keys that all tokens see together, the others one token after another.
  template <class T, class Sees>
  void blend_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, int64_t share, const Sees& sees, const T* const* slots) {
    const int64_t dim = s.value_dim();
    const Range first = sees(0), last = sees(rows - 1), common{last.begin, std::max(last.begin, first.end)};
    for (int64_t g = 0; g < groups; g++) {
      auto blend = [&](int64_t begin, int64_t end, Range keys) {
        if (keys.count() <= 0) return;
        by_rows(end, [&](int64_t r, auto count) {
          const int64_t row = g * rows + r;
          blend_rows<count()>(dim, mix.scores + row * kKeys + keys.begin, s.values(g), keys.count(), slots + keys.begin, mix.mixed + row * dim);
        }, begin);
      };
      for (int64_t r = 0; r < rows; r += share) blend(r, r + share, {sees(r).begin, std::min(sees(r).end, common.begin)});
      blend(0, rows, common);
      for (int64_t r = 0; r < rows; r += share) blend(r, r + share, {std::max(sees(r).begin, common.end), sees(r).end});
    }
  }

  // A block of one kv head for many rows: its keys transposed and its values contiguous, so that tiles multiply with them.
  template <class T>
  void lay(const AttentionShape& s, Mix& mix, Range keys, const T* const* slots) {
    for (int64_t t = keys.first_lane(); t < keys.end; t += kLanes) {
      const T* lines[kLanes];
      key_lines(t, keys.end, slots, lines);
      for (int64_t c = 0; c < s.dim; c += kLanes) {
        const int count = std::min<int64_t>(kLanes, s.dim - c);
        vf square[kLanes];
        if (count == kLanes) turn<kLanes>(lines, c, count, square); else turn<0>(lines, c, count, square);
        for (int i = 0; i < count; i++) store(mix.keys + (c + i) * kKeys + t, square[i]);
      }
    }
    const int64_t dim = s.value_dim();
    vf differences = {};
    for (int64_t t = keys.first_lane(); t < keys.end; t++)
      for (int64_t c = 0; c < dim; c += kLanes) {
        const vf part = load_upto(slots[t] + s.values(0) + c, dim - c);
        differences += part - part;  // NaN where a number is not finite
        store_upto(mix.values + t * dim + c, part, dim - c);
      }
    const float all = sum(differences);
    mix.nonfinite = all != all;
  }

  // The rows of one kv head, a tile at a time, each against the keys that some row of it sees; sees(row): which of the block. A weight of 0
  // does not hide a value that is not finite: rows of such a block are mixed one by one.
  template <class T, class Sees>
  void mix_many(const AttentionShape& s, Mix& mix, int64_t rows, const Sees& sees, const T* const*) {
    const int64_t dim = s.value_dim();
    for (int64_t r = 0, end = 0; r < rows; r = end) {
      end = std::min(rows, r + kTileRows);
      const Range keys{sees(r).begin, sees(end - 1).end};
      if (keys.count() <= 0) continue;
      const int64_t from = keys.first_lane(), to = keys.last_lane();
      float* scores = mix.scores + r * kKeys + from;
      gemm_in_cache(end - r, mix.queries + r * s.dim, s.dim, mix.keys + from, kKeys, s.dim, to - from, scores, kKeys, true);
      for (int64_t i = r; i < end; i++) mix.weigh<Weight>(i, from, to, sees(i), dim);
      if (!mix.nonfinite) {
        gemm_in_cache(end - r, scores, kKeys, mix.values + from * dim, dim, keys.end - from, dim, mix.mixed + r * dim, dim, false);
        continue;
      }
      for (int64_t i = r; i < end; i++)
        if (const Range own = sees(i); own.count() > 0)
          gemm_in_cache(1, mix.scores + i * kKeys + own.begin, kKeys, mix.values + own.begin * dim, dim, own.count(), dim, mix.mixed + i * dim, dim, false);
    }
  }
};

}  // namespace rex
