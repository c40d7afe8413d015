// The product of rows that are rounded to bfloat16 with a matrix of bfloat16 or codes, whose sums are float32: in tiles or in pairs of
// neighbours, whichever this processor is faster with, or else, with rows as they are, in floats (gemm.h).
#pragma once
#include "gemm.h"
#include "tile_gemm.h"

namespace rex {

// Whether this processor is faster with pairs than with floats, and with tiles than with either. Set while no product runs
// (bf16_gains.h).
inline bool pairs_are_faster = true, tiles_are_faster = false;

template <class Matrix>
inline bool fits_tiles(const Matrix& w) {
  return kHasTiles && tiles_are_faster && groups_fit_tiles(w);
}

// Whether rows are rounded and multiplied so: where no row or column is left over. The matrix alone decides: a row's sums must not depend
// on how many rows there are, nor on which part of the columns is requested.
template <class Matrix>
inline bool fits_bf16(const Matrix& w, int64_t depth, int64_t cols) {
  return (pairs_are_faster || fits_tiles(w)) && depth % 2 == 0 && cols % std::max<int64_t>(kLanes, fits_tiles(w) ? kTileSide : 0) == 0;
}

// Rows that are multiplied, [count, width]: one after another, or of bfloat16 in the blocks that tiles read.
template <class R>
struct RowMatrix {
  R* data;
  int64_t count, width;
  bool in_blocks;

  static int64_t step_of(int64_t width, bool in_blocks) { return in_blocks ? (width + kBlock - 1) / kBlock * kBlock : width; }
  int64_t step() const { return step_of(width, in_blocks); }
  operator RowMatrix<const R>() const { return {data, count, width, in_blocks}; }
  // Up to so many rows, the product walks the matrix along its rows.
  template <class Matrix>
  int64_t few_rows(const Matrix& w) const { return in_blocks ? kGroupRows : stream_rows(w); }
  // Rows begin..begin+rows-1; a group begins there.
  RowMatrix slice(int64_t begin, int64_t rows) const { return {data + begin * step(), rows, width, in_blocks}; }

  // Calls body(c, end, to) for columns that have neighbouring addresses.
  template <class Body>
  void each_run(int64_t row, int64_t begin, int64_t end, const Body& body) const {
    if (!in_blocks) return body(begin, end, data + row * width + begin);
    const int64_t group = row / kGroupRows * kGroupRows, height = std::min(kGroupRows, count - group);
    for (int64_t c = begin, last = 0; c < end; c = last) {
      last = std::min(end, (c / kBlock + 1) * kBlock);
      body(c, last, data + group * step() + (c / kBlock * height + row - group) * kBlock + c % kBlock);
    }
  }
  template <class X>
  void set(int64_t row, const X* x) const {
    each_run(row, 0, width, [&](int64_t c, int64_t end, R* to) { convert(x + c, to, end - c); });
    fill_up(row);
  }
  // Zeros behind the last column of a row.
  void fill_up(int64_t row) const {
    if (step() != width) RowMatrix{data, count, step(), true}.each_run(row, width, step(), [](int64_t c, int64_t end, R* to) { std::fill(to, to + (end - c), R{}); });
  }

 private:
  static constexpr int64_t kBlock = 2 * kTileSide;
};

// out[count, cols] = x times w.
template <class Matrix>
void multiply(const RowMatrix<const float>& x, Matrix w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  gemm(x.count, x.data, x.width, w, ldw, x.width, cols, out, ldo, true);
}
// Of a matrix that fits, or whole vectors of its columns; in blocks where it fits tiles.
template <class Matrix>
void multiply_bf16(const RowMatrix<const bf16>& x, Matrix w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  const pair* const pairs = reinterpret_cast<const pair*>(x.data);
  if constexpr (kHasTiles) {
    if (x.in_blocks) return tile_gemm(x.count, pairs, w, ldw, x.width / 2, cols, out, ldo);
  }
  gemm_whole_vectors(x.count, pairs, x.width / 2, w, ldw, x.width / 2, cols, out, ldo, true);
}
inline void multiply(const RowMatrix<const bf16>& x, const bf16* w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  multiply_bf16(x, w, ldw, cols, out, ldo);
}
inline void multiply(const RowMatrix<const bf16>& x, Codes w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  w.with([&](auto own) { multiply_bf16(x, own, ldw, cols, out, ldo); });
}

}  // namespace rex
