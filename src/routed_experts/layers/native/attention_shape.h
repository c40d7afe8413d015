// What attention over a paged pool is given, how its work is cut, and the state of its rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"
#include "parallel.h"

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

  // Convert the scores of keys from..to-1, whole vectors, into weights, rounded to `Weight`; of the block, only `seen` is visible to the row.
  template <class Weight>
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
      const vf weights = none(t) ? vf{} : (sees(t) ? rounded<Weight>(exp(load(line + t) - highest)) : vf{});
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

// Rows 0..rows-1 by fours, then twos and ones: body(first, how many, as a constant).
template <int Most = 4, class Body>
inline void by_rows(int64_t rows, const Body& body, int64_t first = 0) {
  for (; first + Most <= rows; first += Most) body(first, std::integral_constant<int, Most>());
  if constexpr (Most > 1) by_rows<Most / 2>(rows, body, first);
}

// Addresses of kLanes keys of a block, from `first` on; those beyond the last are the last once more.
template <class T>
inline void key_lines(int64_t first, int64_t keys, const T* const* slots, const T* (&lines)[kLanes]) {
  for (int64_t i = 0; i < kLanes; i++) lines[i] = slots[std::min(first + i, keys - 1)];
}

}  // namespace rex
