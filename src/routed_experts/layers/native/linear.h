// y[N, O] = x[N, D] * weights[D, O], read in place: a pointer, or Codes.
#pragma once
#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "bf16_gemm.h"

namespace rex {

constexpr int64_t kHalvedRows = 64;
constexpr int64_t kLinearRows = 512;  // of a piece at most

// Columns of a piece: long runs of a row where memory is the limit, but enough pieces for all cores.
inline int64_t piece_columns(int64_t rows, int64_t cols, int64_t threads) {
  if (rows > kStreamRows) return std::clamp<int64_t>(cols / (4 * threads) / 64 * 64, 128, 512);
  return std::clamp<int64_t>(cols / threads / 64 * 64, 128, 1024);
}

// Rows as floats: in place where they are floats already.
template <class T>
inline const float* as_floats(Scratch& scratch, const T* x, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return x;
  float* wide = scratch.floats(count);
  convert(x, wide, count);
  return wide;
}

// Rows as bfloat16: rounded by all cores where they are wider.
template <class T>
inline const bf16* as_halves(Team& team, Scratch& scratch, const T* x, int64_t rows, int64_t width) {
  if constexpr (std::is_same_v<T, bf16>) return x;
  bf16* narrow = scratch.take<bf16>(rows * width);
  each_block(team, rows, kHalvedRows, [&](int64_t begin, int64_t end) { convert(x + begin * width, narrow + begin * width, (end - begin) * width); });
  return narrow;
}

// Columns c.. of rows r.., straight into y where it holds floats and many rows; few rows add up in scratch, whose rows do not push one
// another out of the cache.
template <class From, class Matrix, class Out>
void linear_piece(int64_t height, int64_t width, int64_t depth, int64_t cols, const From* x, Matrix weights, Out* y) {
  thread_local Scratch scratch;
  if constexpr (std::is_same_v<Out, float>) {
    if (height > kStreamRows) return gemm(height, x, depth, weights, cols, depth, width, y, cols, true);
  }
  const int64_t step = width + kPad;
  float* out = scratch.floats(height * step);
  gemm(height, x, depth, weights, cols, depth, width, out, step, true);
  for (int64_t i = 0; i < height; i++) convert(out + i * step, y + i * cols, width);
}

// With weights of bfloat16, or codes, x is rounded to bfloat16 where that is faster and they fit, unless it is to be `exact`.
template <class X, class Matrix, class Out>
void linear(Team& team, int64_t rows, int64_t depth, int64_t cols, const X* x, Matrix weights, Out* y, bool exact = false) {
  thread_local Scratch scratch;
  const int64_t most = piece_columns(rows, cols, team.size());
  const int64_t across = (cols + most - 1) / most, down = (rows + kLinearRows - 1) / kLinearRows;
  auto run = [&](const auto* from) {
    team.each(across * down, [&](int64_t item) {
      const int64_t c = item % across * most, r = rows * (item / across) / down, end = rows * (item / across + 1) / down;
      const int64_t width = std::min(most, cols - c);
      linear_piece(end - r, width, depth, cols, from + r * depth, weights + c, y + r * cols + c);
    });
  };
  if constexpr (std::is_same_v<Matrix, const bf16*> || std::is_same_v<Matrix, Codes>) {
    if (!exact && fits_bf16(weights, depth, cols)) return run(as_halves(team, scratch, x, rows, depth));
  }
  run(as_floats(scratch, x, rows * depth));
}

}  // namespace rex
