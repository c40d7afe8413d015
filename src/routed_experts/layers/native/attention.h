// Softmax attention over a paged pool [L*P, page, 2G, C]: row 2g of a slot holds the keys of kv head g, row 2g+1 its values. A latent
// pool is [L*P, page, 1, C]: one row is the key of all heads, and its first numbers are the value. Windows, chunks and sinks are those
// of layers/attention_features.py.
// Only slots that some query of the piece sees are read: slots of other requests, and those before a window, may be NaN or freed.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "gemm.h"

namespace rex {

constexpr int64_t kKeys = 64;       // keys of a block
constexpr int64_t kQueries = 128;   // query tokens of a piece of work at most
constexpr int64_t kQueryFloats = 65536;  // of a piece of work: they stay in the second cache
constexpr int64_t kFewRows = 16;    // of a kv head; up to this many, values are read in place; more of them pay for laying out a block
constexpr float kNever = -1e30f;    // masks a score

// Keys begin..end-1 of a request or of a block.
struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
  Range within(int64_t start, int64_t keys) const {  // as counted from `start` on, of so many
    return {std::clamp<int64_t>(begin - start, 0, keys), std::clamp<int64_t>(end - start, 0, keys)};
  }
  int64_t first_lane() const { return begin / kLanes * kLanes; }
  int64_t last_lane() const { return (end + kLanes - 1) / kLanes * kLanes; }
};

// Of a pool of codes: a number is its code times the scale, of keys or of values.
struct KvScales {
  float keys = 1, values = 1;
};

struct AttentionShape {
  int64_t tokens, heads, groups, dim, requests, pages, page, row;  // row: numbers of a pool's row, C or more
  int64_t latent = 0, window = 0, chunk = 0;                       // 0: none
  float scale = 0;                                                 // of the scores; 0: the usual one
  const float* sinks = nullptr;                                    // one a head, or null
  KvScales kv_scales{};
  int64_t share() const { return heads / groups; }
  int64_t width(int64_t of_groups) const { return (latent ? 1 : 2 * of_groups) * row; }  // of those heads' part of a slot
  int64_t stride() const { return width(groups); }                                       // from a slot to the next
  int64_t value_dim() const { return latent ? latent : dim; }
  int64_t values(int64_t group) const { return latent ? 0 : (2 * group + 1) * row; }  // where they are in a slot
  int64_t piece_tokens() const { return std::clamp<int64_t>(kQueryFloats / (share() * dim), 1, kQueries); }
  // What a token at this position attends to.
  Range seen(int64_t position) const {
    int64_t first = 0;
    if (window) first = std::max<int64_t>(first, position - window + 1);
    if (chunk) first = std::max<int64_t>(first, position / chunk * chunk);
    return {first, position + 1};
  }
};

struct PagedStep {
  const int32_t *positions, *query_starts, *page_table;
  int64_t first_page;
};

struct QueryPiece {
  int64_t request, begin, end;  // tokens of the step
  int64_t group, groups;        // kv heads of the piece
  int64_t head, share;          // query heads of each of them
};

// Few queries: all kv heads together read a slot in place. Many, or pieces too few for the cores: each kv head is one; the one head of
// a latent pool is cut between its queries.
inline std::vector<QueryPiece> query_pieces(const AttentionShape& s, const PagedStep& step, int64_t threads) {
  std::vector<QueryPiece> pieces;
  const int64_t most = s.piece_tokens();
  auto queries = [&](int64_t b) { return step.query_starts[b + 1] - step.query_starts[b]; };
  int64_t tiles = 0;
  for (int64_t b = 0; b < s.requests; b++) tiles += (queries(b) + most - 1) / most;
  const int64_t parts = s.latent && tiles < threads ? std::clamp<int64_t>(s.heads / kTileRows, 1, threads) : 1;
  for (int64_t b = 0; b < s.requests; b++) {
    const int64_t together = tiles >= 2 * threads && queries(b) * s.share() <= kFewRows ? s.groups : 1;
    for (int64_t t = step.query_starts[b]; t < step.query_starts[b + 1]; t += most)
      for (int64_t g = 0; g < s.groups; g += together)
        for (int64_t part = 0; part < parts; part++) {
          const int64_t head = s.share() * part / parts, end = s.share() * (part + 1) / parts;
          pieces.push_back({b, t, std::min<int64_t>(t + most, step.query_starts[b + 1]), g, together, head, end - head});
        }
  }
  return pieces;
}

// State of a row (kv head, token, head of the group) over the keys so far: online softmax (Milakov and Gimelshein 2018).
struct Mix {
  Scratch query_scratch, score_scratch, key_scratch, value_scratch, top_scratch, total_scratch, mixed_scratch;
  float *queries, *scores, *keys, *values, *top, *total, *mixed;  // keys (transposed) and values of a block of a kv head
  bool nonfinite;  // some value of the block is NaN or infinite

  void start(int64_t rows, int64_t dim, int64_t value_dim) {
    queries = query_scratch.floats(rows * dim), scores = score_scratch.floats(rows * kKeys);
    keys = key_scratch.floats(dim * kKeys), values = value_scratch.floats(kKeys * value_dim);
    top = top_scratch.floats(rows), total = total_scratch.zeros(rows), mixed = mixed_scratch.zeros(rows * value_dim);
    std::fill(top, top + rows, kNever);
  }

  // Convert the scores of keys from..to-1, whole vectors, into weights; of the block, only `seen` is visible to the row.
  void weigh(int64_t row, int64_t from, int64_t to, Range seen, int64_t value_dim) {
    float* line = scores + row * kKeys;
    auto sees = [&](int64_t t) { return first_lanes(seen.end - t) & ~first_lanes(seen.begin - t); };
    auto none = [&](int64_t t) { return t >= seen.end || t + kLanes <= seen.begin; };
    if (seen.count() <= 0) return std::fill(line + from, line + to, 0.0f);
    vf most = vf{} + top[row];
    for (int64_t t = seen.first_lane(); t < seen.end; t += kLanes) {
      const vf part = load(line + t), known = sees(t) ? part : vf{} + kNever;
      most = known > most ? known : most;
    }
    const float highest = largest(most);
    vf sums = {};
    for (int64_t t = from; t < to; t += kLanes) {
      const vf weights = none(t) ? vf{} : (sees(t) ? exp(load(line + t) - highest) : vf{});
      store(line + t, weights);
      sums += weights;
    }
    const float shrink = exp(vf{} + (top[row] - highest))[0];
    if (shrink != 1.0f && total[row] != 0.0f)
      for (int64_t c = 0; c < value_dim; c++) mixed[row * value_dim + c] *= shrink;
    top[row] = highest;
    total[row] = total[row] * shrink + sum(sums);
  }
};

// Addresses of kLanes keys of a block, from `first` on; those beyond the last are the last once more.
template <class T>
inline void key_lines(int64_t first, int64_t keys, const T* const* slots, const T* (&lines)[kLanes]) {
  for (int64_t i = 0; i < kLanes; i++) lines[i] = slots[std::min(first + i, keys - 1)];
}

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

// Rows 0..rows-1 by fours, then twos and ones: body(first, how many, as a constant).
template <int Most = 4, class Body>
inline void by_rows(int64_t rows, const Body& body, int64_t first = 0) {
  for (; first + Most <= rows; first += Most) body(first, std::integral_constant<int, Most>());
  if constexpr (Most > 1) by_rows<Most / 2>(rows, body, first);
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
template <class Sees>
void mix_many(const AttentionShape& s, Mix& mix, int64_t rows, const Sees& sees) {
  const int64_t dim = s.value_dim();
  for (int64_t r = 0, end = 0; r < rows; r = end) {
    end = std::min(rows, r + kTileRows);
    const Range keys{sees(r).begin, sees(end - 1).end};
    if (keys.count() <= 0) continue;
    const int64_t from = keys.first_lane(), to = keys.last_lane();
    float* scores = mix.scores + r * kKeys + from;
    gemm_in_cache(end - r, mix.queries + r * s.dim, s.dim, mix.keys + from, kKeys, s.dim, to - from, scores, kKeys, true);
    for (int64_t i = r; i < end; i++) mix.weigh(i, from, to, sees(i), dim);
    if (!mix.nonfinite) {
      gemm_in_cache(end - r, scores, kKeys, mix.values + from * dim, dim, keys.end - from, dim, mix.mixed + r * dim, dim, false);
      continue;
    }
    for (int64_t i = r; i < end; i++)
      if (const Range own = sees(i); own.count() > 0)
        gemm_in_cache(1, mix.scores + i * kKeys + own.begin, kKeys, mix.values + own.begin * dim, dim, own.count(), dim, mix.mixed + i * dim, dim, false);
  }
}

template <class Q, class T>
void attend(const AttentionShape& s, const PagedStep& step, const QueryPiece& piece, const Q* queries, const T* pool, Q* out) {
  thread_local Mix mix;
  const int64_t share = piece.share, rows = (piece.end - piece.begin) * share, all = piece.groups * rows, value_dim = s.value_dim();
  const float scale = s.scale != 0 ? s.scale : 1.0f / std::sqrt(static_cast<float>(s.dim));
  auto token = [&](int64_t row) { return piece.begin + row % rows / share; };
  auto head = [&](int64_t row) { return (piece.group + row / rows) * s.share() + piece.head + row % share; };
  auto slot = [&](int64_t at) -> const T* {
    const int64_t listed = step.first_page + step.page_table[piece.request * s.pages + at / s.page];
    return pool + (listed * s.page + at % s.page) * s.stride() + (s.latent ? 0 : s.width(piece.group));
  };
  const Range whole{s.seen(step.positions[piece.begin]).begin, step.positions[piece.end - 1] + 1};
  mix.start(all, s.dim, value_dim);
  for (int64_t r = 0; r < all; r++) {  // rounded as PagedAttend rounds: by the scale of keys first
    const bool scaled = s.kv_scales.keys != 1.0f;
    scale_to(queries + (token(r) * s.heads + head(r)) * s.dim, scaled ? s.kv_scales.keys : scale, mix.queries + r * s.dim, s.dim);
    if (scaled) scale_to(mix.queries + r * s.dim, scale, mix.queries + r * s.dim, s.dim);
  }
  for (int64_t r = 0; s.sinks != nullptr && r < all; r++) mix.top[r] = s.sinks[head(r)], mix.total[r] = 1.0f;  // a weight without a value
  for (int64_t start = whole.begin / kKeys * kKeys; start < whole.end; start += kKeys) {
    const Range keys = whole.within(start, kKeys);
    const T* slots[kKeys];
    for (int64_t t = keys.begin; t < keys.end; t++) slots[t] = slot(start + t);
    for (int64_t t = keys.first_lane(); t < keys.begin; t++) slots[t] = slots[keys.begin];
    auto sees = [&](int64_t row) { return s.seen(step.positions[token(row)]).within(start, kKeys); };
    if (rows > kFewRows) {
      lay(s, mix, keys, slots);
      mix_many(s, mix, rows, sees);
      continue;
    }
    score_few(s, mix, piece.groups, rows, keys, slots);
    for (int64_t r = 0; r < all; r++) mix.weigh(r, keys.first_lane(), keys.last_lane(), sees(r), value_dim);
    blend_few(s, mix, piece.groups, rows, share, sees, slots);
  }
  for (int64_t r = 0; r < all; r++) {
    const float factor = 1.0f / std::max(mix.total[r], 1e-30f);
    const bool scaled = s.kv_scales.values != 1.0f;
    float* mixed = mix.mixed + r * value_dim;
    if (scaled) scale_to(mixed, factor, mixed, value_dim);
    scale_to(mixed, scaled ? s.kv_scales.values : factor, out + (token(r) * s.heads + head(r)) * value_dim, value_dim);
  }
}

template <class Q, class T>
void attention(Team& team, const AttentionShape& s, const PagedStep& step, const Q* queries, const T* cache, Q* out) {
  const int64_t num_fed = s.requests ? step.query_starts[s.requests] : 0;
  const int64_t width = s.heads * s.value_dim();
  std::memset(static_cast<void*>(out + num_fed * width), 0, (s.tokens - num_fed) * width * sizeof(Q));  // padding
  const std::vector<QueryPiece> pieces = query_pieces(s, step, team.size());
  team.each(pieces.size(), [&](int64_t i) { attend(s, step, pieces[i], queries, cache, out); });
}

}  // namespace rex
