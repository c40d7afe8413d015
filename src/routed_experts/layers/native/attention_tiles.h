// Scores and weighted sums of values in tiles (tiles.h), over a pool of bfloat16: queries and weights are rounded to bfloat16, sums are
// float32. Few rows add the same products in vectors, in the order of tiles: the number of tokens of a request in a step must not change a
// row's result. A block's values are added by 32 keys, at positions that are multiples of 32.
#pragma once
#include "attention_shape.h"
#include "bf16_gemm.h"

namespace rex {

constexpr int64_t kTileKeys = 2 * kTileSide;  // keys, or numbers of a key, of a tile's depth; columns of two tiles
static_assert(kKeys % kTileKeys == 0);

// Where a panel of `blocks` of 32 lines has a block of a column: pairs of columns of tiles, of a pair its blocks, of a block its two tiles.
inline pair* tile_of(pair* panel, int64_t blocks, int64_t block, int64_t column) {
  return panel + ((column / kTileKeys * blocks + block) * 2 + column / kTileSide % 2) * kTileSize;
}

// Numbers c..c+31 of kLanes lines, as pairs, transposed: vector i holds pair i of each line.
inline void turn_pairs(const bf16* const* lines, int64_t c, vf (&pairs)[kTileSide]) {
  for (int64_t first = 0; first < kTileSide; first += kLanes) {
    vf square[kLanes];
    for (int64_t i = 0; i < kLanes; i++) square[i] = read<vf>(lines[i] + c + 2 * first);
    transpose(square);
    for (int64_t i = 0; i < kLanes; i++) pairs[first + i] = square[i];
  }
}

// Adds Rows rows of queries times numbers c..c+31 of kLanes keys to their scores.
template <int Rows>
inline void score_pairs(const float* queries, int64_t dim, int64_t c, const vf (&pairs)[kTileSide], float* scores) {
  vf first[Rows] = {}, second[Rows] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kTileSide; i++) {
    const vu both = (vu)pairs[i];
    const vf firsts = (vf)(both << 16), seconds = (vf)(both & 0xffff0000u);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++) {
      first[r] = add_product(first[r], queries + r * dim + c + 2 * i, firsts);
      second[r] = add_product(second[r], queries + r * dim + c + 2 * i + 1, seconds);
    }
  }
  for (int r = 0; r < Rows; r++) {
    float* to = scores + r * kKeys;
    store(to, (c == 0 ? vf{} : load(to)) + (first[r] + second[r]));
  }
}

// Weights times Vectors vectors of columns of the values of a block that Rows rows see.
template <int Rows, int Vectors>
inline void blend_pairs(int64_t dim, const float* weights, int64_t offset, Range keys, const bf16* const* slots, float* mixed) {
  for (int64_t t = keys.begin; t < keys.end;) {
    const int64_t end = std::min(keys.end, (t / kTileKeys + 1) * kTileKeys);
    vf sums[2][Rows][Vectors] = {};  // of even keys, and of odd ones
    auto add = [&](int64_t key, auto odd) {
      vf lines[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) lines[v] = load(slots[key] + offset + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) sums[odd][r][v] = add_product(sums[odd][r][v], weights + r * kKeys + key, lines[v]);
    };
    constexpr std::integral_constant<int, 0> kEven;
    constexpr std::integral_constant<int, 1> kOdd;
    if (t % 2 == 1) add(t++, kOdd);
    for (; t + 2 <= end; t += 2) add(t, kEven), add(t + 1, kOdd);
    if (t < end) add(t++, kEven);
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) {
        float* to = mixed + r * dim + v * kLanes;
        store(to, load(to) + (sums[0][r][v] + sums[1][r][v]));
      }
  }
}

template <int Rows>
inline void blend_rows_of_pairs(int64_t dim, const float* weights, int64_t offset, Range keys, const bf16* const* slots, float* mixed) {
  constexpr int kVectors = Rows > 2 ? 2 : 4;
  static_assert(kTileKeys % kLanes == 0);
  int64_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) blend_pairs<Rows, kVectors>(dim, weights, offset + c, keys, slots, mixed + c);
  for (; c < dim; c += kLanes) blend_pairs<Rows, 1>(dim, weights, offset + c, keys, slots, mixed + c);
}

// A group of rows, in blocks as `RowMatrix` has them, times a panel of `w_blocks` whose columns are in pairs of tiles, added to out, or = where
// `fresh`. `blocks` are multiplied; x and w: the first of them.
inline void multiply_pairs_of_tiles(int64_t rows, int64_t blocks, const bf16* x, const pair* w, int64_t w_blocks, int64_t cols, bool fresh, float* out,
                                    int64_t ldo) {
  Prefetcher none;
  const pair* const from = reinterpret_cast<const pair*>(x);
  for (int64_t c = 0; c < cols; c += kTileKeys, w += 2 * w_blocks * kTileSize)
    if (rows > kTileSide) add_tiles<2, 2>(blocks, from, rows * kTileSide, w, fresh, out + c, ldo, none, 0);
    else add_tiles<1, 2>(blocks, from, rows * kTileSide, w, fresh, out + c, ldo, none, 0);
}

// The same as InFloats in tiles; `few` rows in vectors.
struct InTiles {
  using Weight = bf16;
  using Mode = FlushSubnormal;

  // Whether tiles are whole. The shape alone decides: it is that of all steps of a layer.
  static bool fits(const AttentionShape& s) {
    return kHasTiles && tiles_are_faster && s.dim % kTileKeys == 0 && s.value_dim() % kTileKeys == 0;
  }

  void prepare(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows) {
    if (rows <= kFewRows) {
      for (int64_t i = 0; i < groups * rows * s.dim; i += kLanes) store(mix.queries + i, rounded<bf16>(load(mix.queries + i)));
      return;
    }
    queries_ = {query_scratch_.take<bf16>(rows * s.dim), rows, s.dim, true};
    for (int64_t row = 0; row < rows; row++) queries_.set(row, mix.queries + row * s.dim);
    weights_ = {weight_scratch_.take<bf16>(rows * kKeys), rows, kKeys, true};
    keys_ = key_scratch_.take<pair>(kKeys * s.dim / 2), values_ = value_scratch_.take<pair>(kKeys * s.value_dim() / 2);
    nothing_ = reinterpret_cast<const bf16*>(zero_scratch_.zeros(s.value_dim() / 2));
  }

  void score_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, Range keys, const bf16* const* slots) {
    for (int64_t t = keys.first_lane(); t < keys.end; t += kLanes) {
      const bf16* lines[kLanes];
      key_lines(t, keys.end, slots, lines);
      for (const bf16* line : lines) touch(line, s.width(groups));
      for (int64_t g = 0; g < groups; g++)
        for (int64_t c = 0; c < s.dim; c += kTileKeys) {
          vf pairs[kTileSide];
          turn_pairs(lines, 2 * g * s.row + c, pairs);
          by_rows(rows, [&](int64_t r, auto count) {
            const int64_t row = g * rows + r;
            score_pairs<count()>(mix.queries + row * s.dim, s.dim, c, pairs, mix.scores + row * kKeys + t);
          });
        }
    }
  }

  template <class Sees>
  void blend_few(const AttentionShape& s, Mix& mix, int64_t groups, int64_t rows, int64_t share, const Sees& sees, const bf16* const* slots) {
    for (int64_t row = 0; row < groups * rows; row += share) blend_token(s, mix, row, share, s.values(row / rows), sees(row), slots);
  }

  // A block of one kv head: panels of its keys, and of its values by pairs of keys. Keys that no row sees are those of a neighbour, and their
  // values 0.
  void lay(const AttentionShape& s, Mix& mix, Range keys, const bf16* const* slots) {
    const int64_t from = keys.begin / kTileKeys * kTileKeys, dim = s.value_dim();
    for (int64_t t = from; t < keys.end; t += kTileSide)
      for (int64_t first = t; first < t + kTileSide; first += kLanes) {
        const bf16* lines[kLanes];
        for (int64_t i = 0; i < kLanes; i++) lines[i] = slots[std::clamp(first + i, keys.begin, keys.end - 1)];
        for (int64_t c = 0; c < s.dim; c += kTileKeys) {
          vf pairs[kTileSide];
          turn_pairs(lines, c, pairs);
          pair* const tile = tile_of(keys_, s.dim / kTileKeys, c / kTileKeys, t) + first - t;
          for (int64_t i = 0; i < kTileSide; i++) store(tile + i * kTileSide, (vu)pairs[i]);
        }
      }
    auto line_of = [&](int64_t t) { return t < keys.begin || t >= keys.end ? nothing_ : slots[t] + s.values(0); };
    vh nonfinite = {};
    for (int64_t t = from; t < keys.end || t % kTileKeys != 0; t += 2) {
      const bf16 *first = line_of(t), *second = line_of(t + 1);
      for (int64_t c = 0; c < dim; c += kLanes) {
        for (const bf16* line : {first, second}) nonfinite |= (vh)((read<vh>(line + c) & 0x7f80) == 0x7f80);
        store(tile_of(values_, kKeys / kTileKeys, t / kTileKeys, c) + t % kTileKeys / 2 * kTileSide + c % kTileSide, zip(first + c, second + c));
      }
    }
    mix.nonfinite = false;
    for (int i = 0; i < kLanes; i++) mix.nonfinite |= nonfinite[i] != 0;
  }

  // As InFloats::mix_many.
  template <class Sees>
  void mix_many(const AttentionShape& s, Mix& mix, int64_t rows, const Sees& sees, const bf16* const* slots) {
    const int64_t dim = s.value_dim(), key_blocks = s.dim / kTileKeys;
    Tiles tiles;
    for (int64_t r = 0, end = 0; r < rows; r = end) {
      end = std::min(rows, r + kGroupRows);
      const Range keys{sees(r).begin, sees(end - 1).end};
      if (keys.count() <= 0) continue;
      const int64_t first = keys.begin / kTileKeys, blocks = (keys.end + kTileKeys - 1) / kTileKeys - first, count = end - r;
      const int64_t from = first * kTileKeys, to = from + blocks * kTileKeys;
      tiles.set_rows(count);
      multiply_pairs_of_tiles(count, key_blocks, queries_.slice(r, count).data, tile_of(keys_, key_blocks, 0, from), key_blocks, to - from, true,
                              mix.scores + r * kKeys + from, kKeys);
      for (int64_t i = r; i < end; i++) mix.weigh<Weight>(i, from, to, sees(i), dim);
      if (mix.nonfinite) {
        for (int64_t i = r; i < end; i++) blend_token(s, mix, i, 1, s.values(0), sees(i), slots);
        continue;
      }
      for (int64_t i = r; i < end; i++)
        weights_.each_run(i, from, to, [&](int64_t t, int64_t last, bf16* weights) { convert(mix.scores + i * kKeys + t, weights, last - t); });
      multiply_pairs_of_tiles(count, blocks, weights_.slice(r, count).data + from * count, tile_of(values_, kKeys / kTileKeys, first, 0),
                              kKeys / kTileKeys, dim, false, mix.mixed + r * dim, dim);
    }
  }

 private:
  // Weights of a token's rows times values in place, of the keys that it sees and no more.
  static void blend_token(const AttentionShape& s, Mix& mix, int64_t first, int64_t rows, int64_t offset, Range keys, const bf16* const* slots) {
    const int64_t dim = s.value_dim();
    if (keys.count() <= 0) return;
    by_rows(rows, [&](int64_t r, auto count) {
      blend_rows_of_pairs<count()>(dim, mix.scores + (first + r) * kKeys, offset, keys, slots, mix.mixed + (first + r) * dim);
    });
  }

  Scratch query_scratch_, weight_scratch_, key_scratch_, value_scratch_, zero_scratch_;
  RowMatrix<bf16> queries_{}, weights_{};  // in blocks
  pair *keys_ = nullptr, *values_ = nullptr;
  const bf16* nothing_ = nullptr;  // values of a key that no row sees
};

}  // namespace rex
