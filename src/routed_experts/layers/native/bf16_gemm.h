// The product of rows that are rounded to bfloat16 with a matrix of bfloat16 or codes, whose sums are float32: in tiles or in pairs of
// neighbours, whichever this processor is faster with, or else, with rows as they are, in floats (gemm.h).
#pragma once
#include "gemm.h"
#include "tile_gemm.h"

namespace rex {

// Whether this processor is faster with pairs than with floats, and with tiles than with either. Set once, before the first product
// (bf16_gains.h).
inline bool pairs_are_faster = true, tiles_are_faster = false;

inline bool fits_tiles(const bf16* w) { return kHasTiles && tiles_are_faster && groups_fit_tiles(w); }
inline bool fits_tiles(const Codes& w) { return kHasTiles && tiles_are_faster && groups_fit_tiles(w); }

// Whether rows are rounded and multiplied so: where no row or column is left over. The matrix alone decides: a row's sums must not depend
// on how many rows there are, nor on which part of the columns is requested.
template <class Matrix>
inline bool fits_bf16(const Matrix& w, int64_t depth, int64_t cols) {
  return (pairs_are_faster || fits_tiles(w)) && depth % 2 == 0 && cols % std::max<int64_t>(kLanes, fits_tiles(w) ? kTileSide : 0) == 0;
}

// With such a matrix, or whole vectors of its columns; `ldx` is even.
inline void gemm(int64_t rows, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo, bool fresh) {
  const pair* const pairs = reinterpret_cast<const pair*>(x);
  if constexpr (kHasTiles) {
    if (fits_tiles(w)) return tile_gemm(rows, pairs, ldx / 2, w, ldw, depth / 2, cols, out, ldo, fresh);
  }
  gemm_whole_vectors(rows, pairs, ldx / 2, w, ldw, depth / 2, cols, out, ldo, fresh);
}
inline void gemm(int64_t rows, const bf16* x, int64_t ldx, Codes w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo, bool fresh) {
  const pair* const pairs = reinterpret_cast<const pair*>(x);
  w.with([&](auto own) {
    if constexpr (kHasTiles) {
      if (fits_tiles(w)) return tile_gemm(rows, pairs, ldx / 2, own, ldw, depth / 2, cols, out, ldo, fresh);
    }
    gemm_whole_vectors(rows, pairs, ldx / 2, own, ldw, depth / 2, cols, out, ldo, fresh);
  });
}

}  // namespace rex
