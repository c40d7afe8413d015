// out[rows, cols] = x[rows, depth] * w[depth, cols], in tiles (tiles.h), of rows of bfloat16 and a matrix of bfloat16 or codes whose columns are
// whole tiles.
// Rows come in blocks of 32 columns: groups of 32 rows, of a group its blocks, of a block its rows. w is copied to tiles of 32 rows by 16
// columns, decoded where it is codes: pairs of columns of tiles, of a pair its blocks, of a block its tiles. Where depth ends within a block, zeros
// fill it up.
// One row and two are multiplied in vectors, in the order of tiles. Up to 32 rows walk w along its rows, and copy a line of the cache of each:
// of a group of inputs, or of some blocks. More rows are multiplied with a panel of w that stays in the second cache. Sums of a block are added
// to out in its order along depth, or to the sums of their group of inputs, in all three: a row's result is bitwise independent of the other rows
// of the call.
// depth and steps of x count pairs.
#pragma once
#include <algorithm>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "gemm.h"
#include "tiles.h"

namespace rex {

constexpr int64_t kGroupRows = 2 * kTileSide, kPairColumns = 2 * kTileSide;
constexpr int64_t kVectorLines = 8, kVectorColumns = 2048;
static_assert(kTileSide % kVectorLines == 0);
constexpr int64_t kPanelBlocks = 16;   // a panel's depth
constexpr int64_t kPanelTiles = 16;    // and width: 256 KiB
constexpr int64_t kMostGroup = 512;    // inputs: what a panel is deep
static_assert(kMostGroup == 2 * kTileSide * kPanelBlocks);

// Whether a matrix is multiplied in tiles where the processor is faster with them: groups are whole blocks, and panels whole groups.
inline bool groups_fit_tiles(const bf16*) { return true; }
inline bool groups_fit_tiles(const Codes& w) { return w.group % (2 * kTileSide) == 0 && kMostGroup % w.group == 0; }

// The tiles of this thread, while a product runs.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() { release_tiles(); }
  // For so many rows: one tile of them, or two.
  void set_rows(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    configure_tiles(std::min(rows, kTileSide), std::max<int64_t>(rows - kTileSide, 0));
  }

 private:
  int64_t rows_ = 0;
};

// Calls body(c, vectors) for the columns, of which `vectors` begin at c: a line of the cache, or a tile where fewer are left.
template <class W, class Body>
[[gnu::always_inline]] inline void each_line(int64_t cols, const Body& body) {
  constexpr int64_t kLine = 64 / sizeof(W);
  int64_t c = 0;
  for (; c + kLine <= cols; c += kLine) body(c, std::integral_constant<int, kLine / kLanes>{});
  for (; c < cols; c += kTileSide) body(c, std::integral_constant<int, kTileSide / kLanes>{});
}

// `depth` lines of pairs of w and `cols` columns, to tiles; memory `ahead` of it is prefetched, unless that is 0.
template <class W>
void copy_panel(const W* w, int64_t ldw, int64_t depth, int64_t cols, int64_t ahead, pair* panel) {
  constexpr int64_t kRows = kRowsOf<pair, W>;
  const int64_t blocks = (depth + kTileSide - 1) / kTileSide;
  for (int64_t b = 0; b < blocks; b++, w += kTileSide * kRows * ldw) {
    const int64_t lines = std::min(kTileSide, depth - b * kTileSide);
    auto tile_at = [&](int64_t c) {
      const int64_t first = c / kPairColumns * kPairColumns, across = std::min(kPairColumns, cols - first);
      return panel + (first * blocks + b * across + c - first) * kTileSide;
    };
    each_line<W>(cols, [&](int64_t c, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      pair* to[kVectors];
      for (int v = 0; v < kVectors; v++) to[v] = tile_at(c + v * kLanes / kTileSide * kTileSide) + v * kLanes % kTileSide;
      const W* from = w + c;
      for (int64_t line = 0; line < lines; line++, from += kRows * ldw) {
        for (int64_t row = 0; ahead != 0 && row < kRows; row++) prefetch<2>(from + row * ldw + ahead, kVectors * kLanes);
        vu pairs[kVectors];
        take<pair>(from, ldw, pairs);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) store(to[v] + line * kTileSide, pairs[v]);
      }
      for (int64_t line = lines; line < kTileSide; line++)
        for (int v = 0; v < kVectors; v++) store(to[v] + line * kTileSide, vu{});
    });
  }
}

// out[.., 16 * Across] += Down tiles of rows times `blocks` of w, or = where `fresh`; `x_step`: to the next block.
template <int Down, int Across>
void add_tiles(int64_t blocks, const pair* x, int64_t x_step, const pair* w, bool fresh, float* out, int64_t ldo, Prefetcher& prefetcher, int64_t prefetched) {
  const int64_t step = ldo * sizeof(float);
  float* const below = out + kTileSide * ldo;
  if (fresh) {
    tile_zero<0>();
    if constexpr (Across == 2) tile_zero<1>();
    if constexpr (Down == 2) tile_zero<2>();
    if constexpr (Down == 2 && Across == 2) tile_zero<3>();
  } else {
    tile_load<0>(out, step);
    if constexpr (Across == 2) tile_load<1>(out + kTileSide, step);
    if constexpr (Down == 2) tile_load<2>(below, step);
    if constexpr (Down == 2 && Across == 2) tile_load<3>(below + kTileSide, step);
  }
  for (int64_t b = 0; b < blocks; b++, x += x_step, w += Across * kTileSize) {
    for (int64_t i = 0; i < prefetched; i++) prefetcher.advance();
    tile_load<4>(x, 64);
    tile_load<6>(w, 64);
    tile_dot<0, 4, 6>();
    if constexpr (Across == 2) {
      tile_load<7>(w + kTileSize, 64);
      tile_dot<1, 4, 7>();
    }
    if constexpr (Down == 2) {
      tile_load<5>(x + kTileSize, 64);
      tile_dot<2, 5, 6>();
    }
    if constexpr (Down == 2 && Across == 2) tile_dot<3, 5, 7>();
  }
  tile_store<0>(out, step);
  if constexpr (Across == 2) tile_store<1>(out + kTileSide, step);
  if constexpr (Down == 2) tile_store<2>(below, step);
  if constexpr (Down == 2 && Across == 2) tile_store<3>(below + kTileSide, step);
}

// The same group of inputs by group, whose sums are multiplied by their scales; `blocks` begin with a group.
template <int Down, int Across>
void add_groups(NoScales, int64_t rows, int64_t blocks, const pair* x, const pair* w, bool fresh, float* out, int64_t ldo, Prefetcher& prefetcher,
                int64_t prefetched) {
  add_tiles<Down, Across>(blocks, x, rows * kTileSide, w, fresh, out, ldo, prefetcher, prefetched);
}
template <int Down, int Across>
void add_groups(const Scales<0>& scales, int64_t rows, int64_t blocks, const pair* x, const pair* w, bool fresh, float* out, int64_t ldo,
                Prefetcher& prefetcher, int64_t prefetched) {
  alignas(64) float sums[kGroupRows * kPairColumns];
  constexpr int64_t kWidth = Across * kTileSide;
  const int64_t x_step = rows * kTileSide;
  for (int64_t b = 0, count = 0; b < blocks; b += count) {
    count = std::min(blocks - b, scales.group / kTileSide);
    add_tiles<Down, Across>(count, x + b * x_step, x_step, w + b * Across * kTileSize, true, sums, kWidth, prefetcher, prefetched);
    const Scales<0> own = from_group(scales, b * kTileSide);
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int64_t c = 0; c < kWidth; c += kLanes) {
        float* const to = out + r * ldo + c;
        store(to, total(own + c, 0, fresh && b == 0, to, load(sums + r * kWidth + c)));
      }
  }
}

// A group of rows times tiles of `blocks` of w; x: the first of these blocks.
template <class ScalesOf>
void multiply_tiles(Tiles& tiles, const ScalesOf& scales, int64_t rows, int64_t blocks, const pair* x, const pair* w, int64_t cols, bool fresh, float* out,
                    int64_t ldo, Prefetcher& prefetcher, int64_t prefetched) {
  tiles.set_rows(rows);
  for (int64_t c = 0; c < cols; c += kPairColumns) {
    auto add = [&](auto down, auto across) {
      add_groups<decltype(down)::value, decltype(across)::value>(scales + c, rows, blocks, x, w + c * blocks * kTileSide, fresh, out + c, ldo, prefetcher, prefetched);
    };
    constexpr std::integral_constant<int, 1> kOne;
    constexpr std::integral_constant<int, 2> kTwo;
    if (c + kTileSide == cols) rows > kTileSide ? add(kTwo, kOne) : add(kOne, kOne);
    else rows > kTileSide ? add(kTwo, kTwo) : add(kOne, kTwo);
  }
}

// Lines of pairs that few rows walk side by side: a group of inputs; or a block, and the more rows, the more of them, as their sums are loaded
// and stored for each walk.
inline int64_t stream_depth(NoScales, int64_t rows) { return kTileSide * (rows > kTileSide ? 4 : rows > kTileSide / 2 ? 2 : 1); }
inline int64_t stream_depth(const Scales<0>& scales, int64_t) { return scales.group; }

template <class Matrix>
void few_rows_in_tiles(int64_t rows, const pair* x, Matrix w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(numbers(w))>>;
  thread_local Scratch scratch;
  Tiles tiles;
  Prefetcher none;
  const int64_t step = kRowsOf<pair, W> * ldw, part = stream_depth(scales_from<pair>(w, 0), rows);
  pair* const copy = scratch.take<pair>(kMostGroup / 2 * 64 / sizeof(W));
  for (int64_t c = 0, width = 0; c < cols; c += width) {
    width = std::min(cols - c, stream_columns_of(rows));
    for (int64_t d = 0; d < depth; d += part) {
      const int64_t deep = std::min(part, depth - d), blocks = (deep + kTileSide - 1) / kTileSide;
      each_line<W>(width, [&](int64_t i, auto vectors) {
        constexpr int64_t kWidth = decltype(vectors)::value * kLanes;
        copy_panel(numbers(w) + d * step + c + i, ldw, deep, kWidth, d + deep < depth ? deep * step : 0, copy);
        multiply_tiles(tiles, scales_from<pair>(w + c + i, d), rows, blocks, x + d * rows, copy, kWidth, false, out + c + i, ldo, none, 0);
      });
    }
  }
}

// The first and the second numbers of lines of pairs, as floats.
template <int Vectors, class W>
[[gnu::always_inline]] inline void take_floats(const W* w, int64_t ldw, vf (&first)[Vectors], vf (&second)[Vectors]) {
  if constexpr (std::is_same_v<W, bf16>) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) first[v] = load(w + v * kLanes), second[v] = load(w + ldw + v * kLanes);
  } else {
    vu pairs[Vectors];
    take<pair>(w, ldw, pairs);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) first[v] = (vf)(pairs[v] << 16), second[v] = (vf)(pairs[v] & 0xffff0000u);
  }
}

// Whether lines begin or end their block, and their group of inputs.
struct Bounds {
  bool begins_block, ends_block, begins_group, ends_group;
};

// Adds lines of pairs of w, times Rows rows of x, to the two sums of a block; at its end these to out, or to the sums of the group.
template <int Rows, int Vectors, class W, class ScalesOf>
[[gnu::always_inline]] inline void add_vectors(const ScalesOf& scales, const Bounds& bounds, const pair* x, const W* w, int64_t ldw, int64_t lines,
                                               bool prefetches, float* block, float* sums, int64_t step, float* out, int64_t ldo) {
  constexpr int64_t kRows = kRowsOf<pair, W>;
  vf first[Rows][Vectors], second[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) {
      const float* from = block + 2 * r * step + v * kLanes;
      first[r][v] = bounds.begins_block ? vf{} : load(from), second[r][v] = bounds.begins_block ? vf{} : load(from + step);
    }
  for (int64_t row = 0; prefetches && row < kVectorLines * kRows; row++) prefetch<2>(w + (kVectorLines * kRows + row) * ldw, Vectors * kLanes);
  auto add = [&](int64_t line) {
    vf firsts[Vectors], seconds[Vectors];
    take_floats(w + line * kRows * ldw, ldw, firsts, seconds);
    for (int r = 0; r < Rows; r++) {
      const vu both = vu{} + x[r * kTileSide + line].bits;
      for (int v = 0; v < Vectors; v++) {
        first[r][v] = add_products(first[r][v], (vf)(both << 16), firsts[v]);
        second[r][v] = add_products(second[r][v], (vf)(both & 0xffff0000u), seconds[v]);
      }
    }
  };
  if (lines == kVectorLines) {
#pragma GCC unroll 8
    for (int64_t line = 0; line < kVectorLines; line++) add(line);
  } else {
    for (int64_t line = 0; line < lines; line++) add(line);
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) {
      float *const part = block + 2 * r * step + v * kLanes, *const to = out + r * ldo + v * kLanes, *const sum = sums + r * step + v * kLanes;
      if (!bounds.ends_block) {
        store(part, first[r][v]), store(part + step, second[r][v]);
        continue;
      }
      const vf whole = first[r][v] + second[r][v];
      if constexpr (std::is_same_v<ScalesOf, NoScales>) {
        store(to, load(to) + whole);
      } else {
        const vf grown = (bounds.begins_group ? vf{} : load(sum)) + whole;
        if (bounds.ends_group) store(to, total(scales, v, false, to, grown));
        else store(sum, grown);
      }
    }
}

// Rows so few that to copy w to tiles would take longer: vectors add the same products in the order of tiles. Some lines are walked side by side.
template <int Rows, class Matrix>
void few_rows_in_vectors(const pair* x, Matrix w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(numbers(w))>>;
  thread_local Scratch scratch;
  const int64_t group = stream_depth(scales_from<pair>(w, 0), Rows), most = std::min(cols, kVectorColumns);
  float* const block = scratch.floats(3 * Rows * most);
  float* const sums = block + 2 * Rows * most;
  for (int64_t c = 0, width = 0; c < cols; c += width) {
    width = std::min(cols - c, kVectorColumns);
    for (int64_t d = 0, end = 0; d < depth; d = end) {
      end = std::min(depth, d + kVectorLines);
      const int64_t begin = d / kTileSide * kTileSide;  // of the block
      const bool is_last = end == depth;
      const Bounds bounds{d == begin, is_last || end % kTileSide == 0, begin % group == 0, is_last || end % group == 0};
      const W* const from = numbers(w) + d * kRowsOf<pair, W> * ldw + c;
      each_line<W>(width, [&](int64_t i, auto vectors) {
        add_vectors<Rows, decltype(vectors)::value>(scales_from<pair>(w + c + i, d), bounds, x + begin * Rows + d - begin, from + i, ldw, end - d, !is_last,
                                                    block + i, sums + i, most, out + c + i, ldo);
      });
    }
  }
}

template <class Matrix>
void many_rows_in_tiles(int64_t rows, const pair* x, Matrix w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(numbers(w))>>;
  thread_local Scratch scratch;
  Tiles tiles;
  const int64_t row_pairs = (depth + kTileSide - 1) / kTileSide * kTileSide;
  constexpr int64_t kDepth = kPanelBlocks * kTileSide, kWidth = kPanelTiles * kTileSide;
  pair* const panel = scratch.take<pair>(kPanelBlocks * kPanelTiles * kTileSize);
  const int64_t step = kRowsOf<pair, W> * ldw, stops = (rows + kGroupRows - 1) / kGroupRows * (kPanelTiles / 2);
  const int64_t prefetched = (2 * kTileSide + stops - 1) / stops;
  for (int64_t d = 0; d < depth; d += kDepth) {
    const int64_t deep = std::min(kDepth, depth - d), blocks = (deep + kTileSide - 1) / kTileSide;
    const W* const from = numbers(w) + d * step;
    for (int64_t c = 0, width = 0; c < cols; c += width) {
      width = std::min(kWidth, cols - c);
      copy_panel(from + c, ldw, deep, width, kPackAhead * ldw, panel);
      const int64_t next = c + width;
      Prefetcher prefetcher;
      if (next < cols) {
        const int64_t bytes = std::min(kWidth, cols - next) * sizeof(W);
        prefetcher = {reinterpret_cast<const char*>(from + next), ldw * int64_t(sizeof(W)), deep * kRowsOf<pair, W>, bytes};
      }
      const auto scales = scales_from<pair>(w + c, d);
      for (int64_t r = 0; r < rows; r += kGroupRows) {
        const int64_t count = std::min(kGroupRows, rows - r);
        multiply_tiles(tiles, scales, count, blocks, x + r * row_pairs + d * count, panel, width, d == 0, out + r * ldo + c, ldo, prefetcher, prefetched);
      }
    }
  }
}

// Subnormal numbers are 0, as in tiles.
template <class Matrix>
void tile_gemm(int64_t rows, const pair* x, Matrix w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  const FlushSubnormal flush;
  if (rows > kGroupRows) return many_rows_in_tiles(rows, x, w, ldw, depth, cols, out, ldo);
  for (int64_t r = 0; r < rows; r++) std::fill(out + r * ldo, out + r * ldo + cols, 0.0f);
  if (rows == 1) return few_rows_in_vectors<1>(x, w, ldw, depth, cols, out, ldo);
  if (rows == 2) return few_rows_in_vectors<2>(x, w, ldw, depth, cols, out, ldo);
  few_rows_in_tiles(rows, x, w, ldw, depth, cols, out, ldo);
}

}  // namespace rex
