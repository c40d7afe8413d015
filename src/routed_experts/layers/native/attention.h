// Softmax attention over a paged pool [L*P, page, 2G, C]: row 2g of a slot holds the keys of kv head g, row 2g+1 its values.
// Only slots that some query of the piece may see are read: slots of other requests may be NaN.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "gemm.h"

namespace rex {

constexpr int64_t kKeys = 64;       // keys of a block
constexpr int64_t kQueries = 128;   // query tokens of a piece of work
constexpr int64_t kFewRows = 16;    // of a kv head; up to this many, values are read in place; more of them pay for laying out a block
constexpr float kNever = -1e30f;    // masks a score

struct AttentionShape {
  int64_t tokens, heads, groups, dim, requests, pages, page, row;  // row: numbers of a pool's row, C or more
  int64_t share() const { return heads / groups; }
  int64_t stride() const { return 2 * groups * row; }  // from a slot to the next
};

struct PagedStep {
  const int32_t *positions, *query_starts, *page_table;
  int64_t first_page;
};

struct QueryPiece {
  int64_t request, begin, end;  // tokens of the step
  int64_t group, groups;        // kv heads of the piece
};

// Few queries: all kv heads together read a slot in place. Many, or pieces too few for the cores: each kv head is one.
inline std::vector<QueryPiece> query_pieces(const AttentionShape& s, const PagedStep& step, int64_t threads) {
  std::vector<QueryPiece> pieces;
  auto queries = [&](int64_t b) { return step.query_starts[b + 1] - step.query_starts[b]; };
  int64_t tiles = 0;
  for (int64_t b = 0; b < s.requests; b++) tiles += (queries(b) + kQueries - 1) / kQueries;
  for (int64_t b = 0; b < s.requests; b++) {
    const int64_t together = tiles >= 2 * threads && queries(b) * s.share() <= kFewRows ? s.groups : 1;
    for (int64_t t = step.query_starts[b]; t < step.query_starts[b + 1]; t += kQueries)
      for (int64_t g = 0; g < s.groups; g += together)
        pieces.push_back({b, t, std::min<int64_t>(t + kQueries, step.query_starts[b + 1]), g, together});
  }
  return pieces;
}

// State of a row (kv head, token, head of the group) over the keys so far: online softmax (Milakov and Gimelshein 2018).
struct Mix {
  Scratch query_scratch, score_scratch, key_scratch, value_scratch, top_scratch, total_scratch, mixed_scratch;
  float *queries, *scores, *keys, *values, *top, *total, *mixed;  // keys (transposed) and values of a block of a kv head

  void start(int64_t rows, int64_t dim) {
    queries = query_scratch.floats(rows * dim), scores = score_scratch.floats(rows * kKeys);
    keys = key_scratch.floats(dim * kKeys), values = value_scratch.floats(kKeys * dim);
    top = top_scratch.floats(rows), total = total_scratch.zeros(rows), mixed = mixed_scratch.floats(rows * dim);
    std::fill(top, top + rows, kNever);
  }

  // Convert the scores of `keys` keys into weights; only the first `seen` keys are visible to the row.
  void weigh(int64_t row, int64_t keys, int64_t seen, int64_t dim) {
    float* line = scores + row * kKeys;
    vf most = vf{} + top[row];
    for (int64_t t = 0; t < seen; t += kLanes) {
      const vf part = load(line + t), known = first_lanes(seen - t) ? part : vf{} + kNever;
      most = known > most ? known : most;
    }
    const float highest = largest(most);
    vf sums = {};
    for (int64_t t = 0; t < keys; t += kLanes) {
      const vf weights = t < seen ? (first_lanes(seen - t) ? exp(load(line + t) - highest) : vf{}) : vf{};
      store(line + t, weights);
      sums += weights;
    }
    const float shrink = exp(vf{} + (top[row] - highest))[0];
    if (shrink != 1.0f && total[row] != 0.0f)
      for (int64_t c = 0; c < dim; c++) mixed[row * dim + c] *= shrink;
    top[row] = highest;
    total[row] = total[row] * shrink + sum(sums);
  }
};

// Addresses of 16 keys of a block, from `first` on; those beyond the last are the last once more.
template <class T>
inline void sixteen(int64_t first, int64_t keys, const T* const* slots, const T* (&lines)[kLanes]) {
  for (int64_t i = 0; i < kLanes; i++) lines[i] = slots[std::min(first + i, keys - 1)];
}

// Count numbers of 16 lines from `at` on, transposed: vector i holds number at + i of each.
template <int Count, class T>
inline void turn(const T* const* lines, int64_t at, int count, vf (&square)[kLanes]) {
  for (int i = 0; i < kLanes; i++) square[i] = Count == kLanes ? load(lines[i] + at) : load(lines[i] + at, count);
  transpose(square);
}

// Queries times numbers c.. of 16 keys of a kv head: Count of them, or where that is 0 the last ones of a row.
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

// Queries times keys, for all kv heads of a piece. The sums are bitwise those of `mix_many`: the number of tokens of a request in a step must
// not change a row's result. A slot is touched from end to end before its keys are used: hardware prefetchers follow sequential reads, not
// reads that skip the values.
template <class T>
void score_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, int64_t keys, const T* const* slots) {
  for (int64_t t = 0; t < keys; t += kLanes) {
    const T* lines[kLanes];
    sixteen(t, keys, slots, lines);
    for (const T* line : lines) touch(line, 2 * groups * s.row);
    for (int64_t g = 0; g < groups; g++) {
      const float* queries = mix.queries + g * rows * s.dim;
      float* scores = mix.scores + g * rows * kKeys + t;
      int64_t c = 0;
      for (; c + kLanes <= s.dim; c += kLanes) score_square<kLanes>(s, queries, rows, c, lines, 2 * g * s.row, scores);
      if (c < s.dim) score_square<0>(s, queries, rows, c, lines, 2 * g * s.row, scores);
    }
  }
}

// values of a block, in place, times the weights of Rows rows of one kv head, Vectors vectors of columns: sums stay in registers.
template <int Rows, int Vectors, class T>
inline void blend_columns(const AttentionShape& s, const float* weights, int64_t offset, int64_t keys, const T* const* slots, float* mixed) {
  vf sums[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) sums[r][v] = load(mixed + r * s.dim + v * kLanes);
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
    for (int v = 0; v < Vectors; v++) store(mixed + r * s.dim + v * kLanes, sums[r][v]);
}

template <int Rows, class T>
inline void blend_rows(const AttentionShape& s, const float* weights, int64_t offset, int64_t keys, const T* const* slots, float* mixed) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= s.dim; c += 4 * kLanes) blend_columns<Rows, 4>(s, weights, offset + c, keys, slots, mixed + c);
  for (; c + kLanes <= s.dim; c += kLanes) blend_columns<Rows, 1>(s, weights, offset + c, keys, slots, mixed + c);
  if (const int rest = s.dim - c)
    for (int r = 0; r < Rows; r++) {
      vf sums = load(mixed + r * s.dim + c, rest);
      for (int64_t t = 0; t < keys; t++) sums += weights[r * kKeys + t] * load(slots[t] + offset + c, rest);
      store(mixed + r * s.dim + c, sums, rest);
    }
}

// Rows 0..rows-1 by fours, then twos and ones: body(first, how many, as a constant).
template <int Most = 4, class Body>
inline void by_rows(int64_t rows, const Body& body, int64_t first = 0) {
  for (; first + Most <= rows; first += Most) body(first, std::integral_constant<int, Most>());
  if constexpr (Most > 1) by_rows<Most / 2>(rows, body, first);
}

// Weights times values in place, for all kv heads of a piece; the sums, too, are those of `mix_many`.
template <class T>
void blend_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, int64_t keys, const T* const* slots) {
  for (int64_t g = 0; g < groups; g++)
    by_rows(rows, [&](int64_t r, auto count) {
      const int64_t row = g * rows + r;
      blend_rows<count()>(s, mix.scores + row * kKeys, (2 * g + 1) * s.row, keys, slots, mix.mixed + row * s.dim);
    });
}

// A block of one kv head for many rows: its keys transposed and its values contiguous, so that tiles multiply with them.
template <class T>
void lay(const AttentionShape& s, Mix& mix, int64_t keys, const T* const* slots) {
  for (int64_t t = 0; t < keys; t += kLanes) {
    const T* lines[kLanes];
    sixteen(t, keys, slots, lines);
    for (int64_t c = 0; c < s.dim; c += kLanes) {
      const int count = std::min<int64_t>(kLanes, s.dim - c);
      vf square[kLanes];
      if (count == kLanes) turn<kLanes>(lines, c, count, square); else turn<0>(lines, c, count, square);
      for (int i = 0; i < count; i++) store(mix.keys + (c + i) * kKeys + t, square[i]);
    }
  }
  for (int64_t t = 0; t < keys; t++) convert(slots[t] + s.row, mix.values + t * s.dim, s.dim);
}

// The rows of one kv head, a tile at a time, each against the keys that its last row sees; seen(row): how many of the block. The first
// block, of which every row sees some, is fresh.
template <class Seen>
void mix_many(const AttentionShape& s, Mix& mix, int64_t rows, bool fresh, const Seen& seen) {
  for (int64_t r = 0, end = 0; r < rows; r = end) {
    end = std::min(rows, r + kTileRows);
    const int64_t most = seen(end - 1), padded = (most + kLanes - 1) / kLanes * kLanes;
    if (most == 0) continue;
    float* scores = mix.scores + r * kKeys;
    gemm_in_cache(end - r, mix.queries + r * s.dim, s.dim, mix.keys, kKeys, s.dim, padded, scores, kKeys, true);
    for (int64_t i = r; i < end; i++) mix.weigh(i, padded, seen(i), s.dim);
    gemm_in_cache(end - r, scores, kKeys, mix.values, s.dim, most, s.dim, mix.mixed + r * s.dim, s.dim, fresh);
  }
}

template <class Q, class T>
void attend(const AttentionShape& s, const PagedStep& step, const QueryPiece& piece, const Q* queries, const T* pool, Q* out) {
  thread_local Mix mix;
  const int64_t share = s.share(), rows = (piece.end - piece.begin) * share, all = piece.groups * rows;
  const int64_t length = step.positions[piece.end - 1] + 1;
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
  auto token = [&](int64_t row) { return piece.begin + row % rows / share; };
  auto place = [&](int64_t row) { return (token(row) * s.heads + (piece.group + row / rows) * share + row % share) * s.dim; };
  auto slot = [&](int64_t at) -> const T* {
    const int64_t listed = step.first_page + step.page_table[piece.request * s.pages + at / s.page];
    return pool + (listed * s.page + at % s.page) * s.stride() + 2 * piece.group * s.row;
  };
  mix.start(all, s.dim);
  for (int64_t r = 0; r < all; r++) scale_to(queries + place(r), scale, mix.queries + r * s.dim, s.dim);
  for (int64_t start = 0; start < length; start += kKeys) {
    const int64_t keys = std::min(kKeys, length - start);
    const T* slots[kKeys];
    for (int64_t t = 0; t < keys; t++) slots[t] = slot(start + t);
    auto seen = [&](int64_t row) { return std::clamp<int64_t>(step.positions[token(row)] + 1 - start, 0, keys); };
    if (rows > kFewRows) {
      lay(s, mix, keys, slots);
      mix_many(s, mix, rows, start == 0, seen);
      continue;
    }
    if (start == 0) std::fill(mix.mixed, mix.mixed + all * s.dim, 0.0f);
    score_few(s, mix, piece.groups, rows, keys, slots);
    for (int64_t r = 0; r < all; r++) mix.weigh(r, keys, seen(r), s.dim);
    blend_few(s, mix, piece.groups, rows, keys, slots);
  }
  for (int64_t r = 0; r < all; r++) scale_to(mix.mixed + r * s.dim, 1.0f / std::max(mix.total[r], 1e-30f), out + place(r), s.dim);
}

template <class Q, class T>
void attention(Team& team, const AttentionShape& s, const PagedStep& step, const Q* queries, const T* cache, Q* out) {
  const int64_t told = s.requests ? step.query_starts[s.requests] : 0;
  std::memset(static_cast<void*>(out + told * s.heads * s.dim), 0, (s.tokens - told) * s.heads * s.dim * sizeof(Q));  // padding
  const std::vector<QueryPiece> pieces = query_pieces(s, step, team.size());
  team.each(pieces.size(), [&](int64_t i) { attend(s, step, pieces[i], queries, cache, out); });
}

}  // namespace rex
