// Operations on rows alone, between the matrices of a layer that runs in pieces: norms, and gate|up to hidden values. Each is computed in
// float32 and rounded once, so a row's bits depend on the row, its dtype and the parameters alone. (XLA sums a row in an order that depends
// on how many rows a program has.)
#pragma once
#include <cmath>

#include "experts.h"
#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int64_t kRowsAtOnce = 64;

struct NormShape {
  int64_t rows, width;
  float eps, offset;  // offset: added to the scale
};

// x / rms(x) * (scale + offset); with a bias [D], x is centred first and the bias added last.
template <class X, class T, class Out>
void norm_row(const NormShape& s, const X* x, const T* scale, const T* bias, Out* out) {
  vf sums = {};
  for (int64_t d = 0; bias != nullptr && d < s.width; d += kLanes) sums += load_upto(x + d, s.width - d);
  const float mean = bias == nullptr ? 0.0f : sum(sums) / s.width;
  vf squares = {};
  for (int64_t d = 0; d < s.width; d += kLanes) {
    const vf part = load_upto(x + d, s.width - d) - mean;
    const vf kept = s.width - d >= kLanes ? part : (vf)((vi)part & first_lanes(s.width - d));
    squares += kept * kept;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / s.width + s.eps);
  for (int64_t d = 0; d < s.width; d += kLanes) {
    const int64_t left = s.width - d;
    vf y = (load_upto(x + d, left) - mean) * inverse * (load_upto(scale + d, left) + s.offset);
    if (bias != nullptr) y += load_upto(bias + d, left);
    store_upto(out + d, y, left);
  }
}

template <class X, class T, class Out>
void norm_rows(Team& team, const NormShape& s, const X* x, const T* scale, const T* bias, Out* out) {
  each_block(team, s.rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) norm_row(s, x + n * s.width, scale, bias, out + n * s.width);
  });
}

// gate|up [N, 2F] -> activated [N, F].
template <class X, class Out>
void gate_rows(Team& team, Activation activation, int64_t rows, int64_t width, const X* x, Out* out) {
  each_block(team, rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t n = begin; n < end; n++) {
      const X* row = x + n * 2 * width;
      const float* none = nullptr;
      const float* both = as_floats(scratch, row, 2 * width);
      gate(activation, both, both + width, none, none, width, out + n * width);
    }
  });
}

// y += shared, each row times the sigmoid of the product of its row of x and `gates` [D]; null: times one. All are [N, D].
template <class T>
void add_gated_rows(Team& team, int64_t rows, int64_t width, const float* x, const T* gates, const float* shared, float* y) {
  each_block(team, rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      vf products = {};
      for (int64_t d = 0; gates != nullptr && d < width; d += kLanes)
        products += load_upto(x + n * width + d, width - d) * load_upto(gates + d, width - d);
      const float weight = gates == nullptr ? 1.0f : 1.0f / (1.0f + exp(vf{} - sum(products))[0]);
      for (int64_t d = n * width; d < (n + 1) * width; d += kLanes) {
        const int64_t left = (n + 1) * width - d;
        store_upto(y + d, load_upto(y + d, left) + weight * load_upto(shared + d, left), left);
      }
    }
  });
}

}  // namespace rex
