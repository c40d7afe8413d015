// out[rows, cols] += x[rows, depth] * w[depth, cols] in float32, or = where `fresh`, for weights of any dtype that lie where they were
// loaded.
// Few rows are bound by memory: w is walked along its rows, eight at a time, as memory and prefetchers like it. Many rows are bound by
// arithmetic: tiles of 6 rows by 4 vectors stay in registers, over a panel of w that stays in cache.
// A row's result does not depend on the other rows of the call where `rows` takes the same path.
#pragma once
#include <algorithm>

#include "vec.h"

namespace rex {

constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
constexpr int kStreamRows = 40;  // up to this many rows are streamed
constexpr int kSingleRows = 8;   // up to this many by single vectors, more of them by pairs, which share what they multiply with
constexpr int kStreamDepth = 8;  // rows of w walked side by side
constexpr int kPackAhead = 16;   // rows
constexpr int64_t kPanelDepth = 128;  // rows of a panel: 32 KiB, which stay in the first cache
constexpr int kPad = kLanes;     // between rows of scratch: rows a power of two apart would share a few lines of the cache

template <int Rows, int Vectors, class W>
inline void tile(bool fresh, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, float* out, int64_t ldo) {
  vf sums[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) sums[r][v] = fresh ? vf{} : load(out + r * ldo + v * kLanes);
  for (int64_t d = 0; d < depth; d++) {
    vf column[Vectors];
    for (int v = 0; v < Vectors; v++) column[v] = load(w + d * ldw + v * kLanes);
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) sums[r][v] += x[r * ldx + d] * column[v];
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(out + r * ldo + v * kLanes, sums[r][v]);
}

template <int Vectors, class W>
inline void tile_rows(int rows, bool fresh, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, float* out, int64_t ldo) {
  switch (rows) {
    case 1: return tile<1, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
    case 2: return tile<2, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
    case 3: return tile<3, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
    case 4: return tile<4, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
    case 5: return tile<5, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
    default: return tile<6, Vectors>(fresh, x, ldx, w, ldw, depth, out, ldo);
  }
}

// The last columns, fewer than a vector.
template <class W>
inline void ragged_columns(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, int count, float* out,
                           int64_t ldo) {
  for (int64_t r = 0; r < rows; r++) {
    vf sums = load(out + r * ldo, count);
    for (int64_t d = 0; d < depth; d++) sums += x[r * ldx + d] * load(w + d * ldw, count);
    store(out + r * ldo, sums, count);
  }
}

template <int Depth, int Vectors, class W>
[[gnu::always_inline]] inline void stream_columns(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t ldw, float* out, int64_t ldo) {
  vf lines[Depth][Vectors];
  for (int d = 0; d < Depth; d++)
    for (int v = 0; v < Vectors; v++) lines[d][v] = load(w + d * ldw + v * kLanes);
  for (int d = 0; d < Depth; d++) prefetch(w + (d + Depth) * ldw, Vectors * kLanes);
  for (int64_t r = 0; r < rows; r++) {
    vf sums[Vectors];
    for (int v = 0; v < Vectors; v++) sums[v] = load(out + r * ldo + v * kLanes);
    for (int d = 0; d < Depth; d++)
      for (int v = 0; v < Vectors; v++) sums[v] += x[r * ldx + d] * lines[d][v];
    for (int v = 0; v < Vectors; v++) store(out + r * ldo + v * kLanes, sums[v]);
  }
}

template <int Depth, class W>
inline void stream(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  int64_t c = 0;
  for (; rows > kSingleRows && c + 2 * kLanes <= cols; c += 2 * kLanes)
    stream_columns<Depth, 2>(rows, x, ldx, w + c, ldw, out + c, ldo);
  for (; c + kLanes <= cols; c += kLanes) stream_columns<Depth, 1>(rows, x, ldx, w + c, ldw, out + c, ldo);
}

// A panel of w as floats, row after row: where w itself lies, its rows would push one another out of the cache.
template <class W>
inline const float* pack(const W* w, int64_t ldw, int64_t depth, int64_t width) {
  thread_local Scratch scratch;
  float* panel = scratch.floats(kPanelDepth * kTileVectors * kLanes);
  for (int64_t d = 0; d < depth; d++) {
    prefetch(w + (d + kPackAhead) * ldw, width);
    for (int64_t c = 0; c < width; c += kLanes) store(panel + d * width + c, load(w + d * ldw + c));
  }
  return panel;
}

template <class W>
void product(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo,
             bool fresh = false) {
  const int64_t whole = cols - cols % kLanes, tiles = (rows + kTileRows - 1) / kTileRows;
  if (fresh) {
    const int64_t first = rows <= kStreamRows ? 0 : whole;  // tiles begin at 0 by themselves
    for (int64_t r = 0; r < rows; r++) std::fill(out + r * ldo + first, out + r * ldo + cols, 0.0f);
  }
  if (rows <= kStreamRows) {
    int64_t d = 0;
    for (; d + kStreamDepth <= depth; d += kStreamDepth) stream<kStreamDepth>(rows, x + d, ldx, w + d * ldw, ldw, cols, out, ldo);
    for (; d < depth; d++) stream<1>(rows, x + d, ldx, w + d * ldw, ldw, cols, out, ldo);
  } else {
    for (int64_t d = 0; d < depth; d += kPanelDepth) {
      const int64_t deep = std::min(kPanelDepth, depth - d);
      for (int64_t c = 0, width = 0; c < whole; c += width) {
        width = c + kTileVectors * kLanes <= whole ? kTileVectors * kLanes : kLanes;
        const float* panel = pack(w + d * ldw + c, ldw, deep, width);
        for (int64_t t = 0, r = 0, end = 0; t < tiles; t++, r = end) {  // tiles differ by one row at most
          end = rows * (t + 1) / tiles;
          if (width > kLanes) {
            tile_rows<kTileVectors>(end - r, fresh && d == 0, x + r * ldx + d, ldx, panel, width, deep, out + r * ldo + c, ldo);
          } else {
            tile_rows<1>(end - r, fresh && d == 0, x + r * ldx + d, ldx, panel, width, deep, out + r * ldo + c, ldo);
          }
        }
      }
    }
  }
  if (whole < cols) ragged_columns(rows, x, ldx, w + whole, ldw, depth, cols - whole, out + whole, ldo);
}

}  // namespace rex
