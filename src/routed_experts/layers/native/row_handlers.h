// The handlers of operations on rows: check shapes and dtypes, then run them.
#pragma once
#include "handlers.h"
#include "rows.h"

namespace rex {

// The last axis of x is normalised; `bias` [D], or [0] for a norm by the root of the mean square.
ffi::Error run_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y, float eps,
                    float offset) {
  const auto dims = x.dimensions();
  const int64_t width = dims.size() ? dims.back() : 0, num_biases = bias.element_count();
  if (width < 1 || int64_t(scale.element_count()) != width || (num_biases != 0 && num_biases != width) || y->element_count() != x.element_count() ||
      bias.element_type() != scale.element_type())
    return mismatch("x and its norm are [.., D], scale [D] and bias [D] or [0] of one dtype");
  const NormShape shape{int64_t(x.element_count()) / width, width, eps, offset};
  Team team(pool);
  return dispatch_dtype(scale.element_type(), [&](auto type) {
    using T = decltype(type);
    return dispatch_dtype(x.element_type(), [&](auto from) {
      return dispatch_dtype(y->element_type(), [&](auto to) {
        norm_rows(team, shape, at<decltype(from)>(x), at<T>(scale), num_biases ? at<T>(bias) : nullptr, at<decltype(to)>(y));
        return ffi::Error::Success();
      });
    });
  });
}

ffi::Error run_gate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t activation) {
  const auto wide = x.dimensions(), dims = y->dimensions();
  if (wide.size() != 2 || dims.size() != 2 || wide[0] != dims[0] || wide[1] != 2 * dims[1]) return mismatch("x is [N, 2F] and its result [N, F]");
  if (activation < 0 || activation > int64_t(Activation::kTanhGelu)) return ffi::Error::InvalidArgument("no such activation");
  Team team(pool);
  return dispatch_dtype(x.element_type(), [&](auto from) {
    return dispatch_dtype(y->element_type(), [&](auto to) {
      gate_rows(team, Activation(activation), dims[0], dims[1], at<decltype(from)>(x), at<decltype(to)>(y));
      return ffi::Error::Success();
    });
  });
}

// `y` is returned as `sum`, the same memory.
ffi::Error run_add_gated(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> shared, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer gates,
                         ffi::Result<ffi::Buffer<ffi::F32>> sum) {
  const auto rows = y.dimensions();
  if (y.untyped_data() != sum->untyped_data()) return ffi::Error::Internal("the rows were copied");
  if (rows.size() != 2 || shared.element_count() != y.element_count() || x.element_count() != y.element_count() || int64_t(gates.element_count()) != rows[1])
    return mismatch("rows are [N, D], and gates [D]");
  Team team(pool);
  return dispatch_dtype(gates.element_type(), [&](auto type) {
    add_gated_rows(team, rows[0], rows[1], x.typed_data(), at<decltype(type)>(gates), shared.typed_data(), sum->typed_data());
    return ffi::Error::Success();
  });
}

}  // namespace rex
