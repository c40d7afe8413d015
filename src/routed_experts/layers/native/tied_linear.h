// y[N, V] = x[N, D] times the transpose of w[V, D], which is read in place: the head of a model whose embeddings are tied.
// The product of two rows adds up in the lanes of a vector, and these are summed last, always in one order: a row's result is bitwise
// independent of the other rows, and of the tile that it falls into.
#pragma once
#include <algorithm>

#include "bf16_gemm.h"
#include "linear.h"
#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int kTiedFewRows = kRegisters > 16 ? 24 : 8;  // up to this many rows, pieces are those of few rows
constexpr int kSquareRows = kRegisters / 8;  // of a tile of as many sums as a vector has lanes: 4 by 4, or 2 by 4

// Lane i: the sum of the lanes of vector i.
template <int Half>
inline vf sum_each(vf (&vectors)[2 * Half]) {
  vf sums[Half];
  for (int i = 0; i < Half; i++) {
    vf a = vectors[i], b = vectors[i + Half];
    exchange<Half>(a, b);
    sums[i] = a + b;
  }
  if constexpr (Half == 1) return sums[0];
  else return sum_each<Half / 2>(sums);
}

// Lane r * Lines + l: the product of row r of x with line l. U, W: float or 16 bits, or both pairs; depth and ldx count them. `next`: numbers
// from a line to the one that is read after it.
template <int Rows, int Lines, class U, class W>
inline vf tied_tile(const U* x, int64_t ldx, const W* const (&lines)[Lines], int64_t depth, int64_t next) {
  static_assert(Rows * Lines == kLanes);
  vf sums[kLanes] = {};
  auto add = [&](const U* from, int64_t step, const W* const (&at)[Lines], int64_t d) {
    decltype(load(x)) row[Rows];
    for (int r = 0; r < Rows; r++) row[r] = load(from + r * step + d), keep(row[r]);
    decltype(load(lines[0])) line[Lines];
    for (int l = 0; l < Lines; l++) line[l] = load(at[l] + d);
    for (int l = 0; l < Lines; l++)
      for (int r = 0; r < Rows; r++) sums[r * Lines + l] = add_products(sums[r * Lines + l], row[r], line[l]);
  };
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    if (next != 0)
      for (int l = 0; l < Lines; l++) prefetch(lines[l] + d + next, kLanes);
    add(x, ldx, lines, d);
  }
  if (d < depth) {  // the last numbers, with zeros behind them
    U rows[Rows * kLanes] = {};
    W ends[kLanes * kLanes] = {};
    const W* at[Lines];
    for (int r = 0; r < Rows; r++) std::memcpy(rows + r * kLanes, x + r * ldx + d, (depth - d) * sizeof(U));
    for (int l = 0; l < Lines; l++) {
      std::memcpy(ends + l * kLanes, lines[l] + d, (depth - d) * sizeof(W));
      at[l] = ends + l * kLanes;
    }
    add(rows, kLanes, at, 0);
  }
  return sum_each<kLanes / 2>(sums);
}

// Lines begin..end-1, `Lines` at a time for all rows, so that they stay in the first cache. Past an end its last lines and rows are
// multiplied again: they have the same bits.
template <int Rows, class U, class W>
void tied_piece(int64_t rows, const U* x, const W* w, int64_t depth, int64_t begin, int64_t end, float* y, int64_t ldy) {
  constexpr int kLines = kLanes / Rows;
  for (int64_t v = begin; v < end; v += kLines) {
    const int64_t count = std::min<int64_t>(kLines, end - v);
    const W* lines[kLines];
    for (int l = 0; l < kLines; l++) lines[l] = w + std::min(v + l, end - 1) * depth;
    for (int64_t r = 0; r < rows; r += Rows) {
      const int64_t row = std::min(r, rows - Rows);
      float products[kLanes];
      store(products, tied_tile<Rows>(x + row * depth, depth, lines, depth, r == 0 ? kLines * depth : 0));
      for (int i = 0; i < Rows; i++) std::memcpy(y + (row + i) * ldy + v, products + i * kLines, count * sizeof(float));
    }
  }
}

// As in `linear`: rows meet bfloat16 as pairs where pairs are faster than floats and none is left over.
template <class T>
void tied_linear(Team& team, int64_t rows, int64_t depth, int64_t lines, const T* x, const T* w, float* y) {
  thread_local Scratch scratch;
  const int64_t most = piece_columns(rows, lines, team.size(), kTiedFewRows);
  auto run = [&](const auto* from, const auto* matrix, int64_t width) {
    team.each((lines + most - 1) / most, [&](int64_t item) {
      const int64_t begin = item * most, end = std::min(lines, begin + most);
      if (rows >= kSquareRows) return tied_piece<kSquareRows>(rows, from, matrix, width, begin, end, y, lines);
      if (rows >= 2) return tied_piece<2>(rows, from, matrix, width, begin, end, y, lines);
      tied_piece<1>(rows, from, matrix, width, begin, end, y, lines);
    });
  };
  if constexpr (std::is_same_v<T, bf16>) {
    if (pairs_are_faster && depth % 2 == 0) return run(reinterpret_cast<const pair*>(x), reinterpret_cast<const pair*>(w), depth / 2);
  }
  run(as_floats(scratch, x, rows * depth), w, depth);
}

}  // namespace rex
