// The handlers of the head and of what follows it: check shapes and dtypes, then run them.
#pragma once
#include "argmax.h"
#include "handlers.h"
#include "tied_linear.h"

namespace rex {

ffi::Error run_tied_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const auto rows = x.dimensions(), lines = weights.dimensions(), out = y->dimensions();
  if (x.element_type() != weights.element_type() || rows.size() != 2 || lines.size() != 2 || rows[1] != lines[1] || out.size() != 2 ||
      out[0] != rows[0] || out[1] != lines[0])
    return mismatch("x is [N, D] and weights [V, D] of one dtype, and the result [N, V]");
  Team team(pool);
  return dispatch_dtype(weights.element_type(), [&](auto type) {
    using T = decltype(type);
    tied_linear(team, rows[0], rows[1], lines[0], at<T>(x), at<T>(weights), y->typed_data());
    return ffi::Error::Success();
  });
}

ffi::Error run_argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Result<ffi::Buffer<ffi::S32>> tokens,
                      ffi::Result<ffi::Buffer<ffi::F32>> logprobs) {
  const auto rows = scores.dimensions();
  if (int64_t(tokens->element_count()) != rows[0] || int64_t(logprobs->element_count()) != rows[0] || rows[1] < 1)
    return mismatch("scores are [B, V], tokens and logprobs [B]");
  Team team(pool);
  argmax_tokens(team, rows[0], rows[1], scores.typed_data(), tokens->typed_data(), logprobs->typed_data());
  return ffi::Error::Success();
}

ffi::Error run_logprobs(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::S32> tokens,
                        ffi::Result<ffi::Buffer<ffi::F32>> logprobs) {
  const auto rows = scores.dimensions(), chosen = tokens.dimensions(), out = logprobs->dimensions();
  if (rows.size() != 2 || chosen.size() != 2 || out.size() != 2 || chosen[0] != rows[0] || out[0] != rows[0] || out[1] != chosen[1] || rows[1] < 1)
    return mismatch("scores are [B, V], tokens and logprobs [B, T]");
  Team team(pool);
  token_logprobs(team, rows[0], rows[1], chosen[1], scores.typed_data(), tokens.typed_data(), logprobs->typed_data());
  return ffi::Error::Success();
}

}  // namespace rex
