// y[N, O] = x[N, D] * weights[D, O], read in place: a pointer, or Codes.
#pragma once
#include <algorithm>
#include <type_traits>

#include "parallel.h"
#include "bf16_gemm.h"

namespace rex {

constexpr int64_t kRoundedRows = 64;
constexpr int64_t kLinearRows = 512;  // of a piece; less than a group more, as pieces begin with one

// Columns of a piece: long runs of a row where memory is the limit, but enough pieces for all cores.
inline int64_t piece_columns(int64_t rows, int64_t cols, int64_t threads, int64_t few_rows) {
  if (rows > few_rows) return std::clamp<int64_t>(cols / (4 * threads) / 64 * 64, 128, 512);
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

// Rows as bfloat16, which all cores round or put in blocks; in place where that is not needed.
template <class T>
inline RowMatrix<const bf16> as_bf16(Team& team, Scratch& scratch, const T* x, int64_t rows, int64_t width, bool in_blocks) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (!in_blocks) return {x, rows, width, false};
  }
  const RowMatrix<bf16> to{scratch.take<bf16>(rows * RowMatrix<bf16>::step_of(width, in_blocks)), rows, width, in_blocks};
  each_block(team, rows, kRoundedRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) to.set(row, x + row * width);
  });
  return {to.data, rows, width, in_blocks};
}

// Columns c.. of rows r.., straight into y where it holds floats and many rows; few rows add up in scratch, whose rows do not push one
// another out of the cache.
template <class R, class Matrix, class Out>
void linear_piece(const RowMatrix<R>& x, int64_t width, int64_t cols, Matrix weights, Out* y) {
  thread_local Scratch scratch;
  if constexpr (std::is_same_v<Out, float>) {
    if (x.count > x.few_rows(weights)) return multiply(x, weights, cols, width, y, cols);
  }
  const int64_t step = width + kPad;
  float* out = scratch.floats(x.count * step);
  multiply(x, weights, cols, width, out, step);
  for (int64_t i = 0; i < x.count; i++) convert(out + i * step, y + i * cols, width);
}

// The row that a part begins with: whole groups, as blocks have them.
inline int64_t first_row(int64_t rows, int64_t part, int64_t parts) { return part == parts ? rows : rows * part / parts / kGroupRows * kGroupRows; }

// With weights of bfloat16, or codes, x is rounded to bfloat16 where that is faster and they fit, unless it is to be `exact`.
template <class X, class Matrix, class Out>
void linear(Team& team, int64_t rows, int64_t depth, int64_t cols, const X* x, Matrix weights, Out* y, bool exact = false) {
  thread_local Scratch scratch;
  const int64_t most = piece_columns(rows, cols, team.size(), stream_rows(weights));
  const int64_t across = (cols + most - 1) / most, down = (rows + kLinearRows - 1) / kLinearRows;
  auto run = [&](const auto& from) {
    team.each(across * down, [&](int64_t item) {
      const int64_t c = item % across * most, r = first_row(rows, item / across, down), end = first_row(rows, item / across + 1, down);
      linear_piece(from.slice(r, end - r), std::min(most, cols - c), cols, weights + c, y + r * cols + c);
    });
  };
  if constexpr (std::is_same_v<Matrix, const bf16*> || std::is_same_v<Matrix, Codes>) {
    if (!exact && fits_bf16(weights, depth, cols)) return run(as_bf16(team, scratch, x, rows, depth, fits_tiles(weights)));
  }
  run(RowMatrix<const float>{as_floats(scratch, x, rows * depth), rows, depth, false});
}

}  // namespace rex
