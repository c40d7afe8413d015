// The handler of the gated delta rule: checks shapes and dtypes, then runs it.
#pragma once
#include <algorithm>
#include <vector>

#include "delta_rule.h"
#include "handlers.h"
#include "linear.h"

namespace rex {

// States are returned as `conv_written` and `recurrent_written`, the same memory.
ffi::Error run_delta_rule(ffi::ThreadPool pool, ffi::AnyBuffer mixed, ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta,
                          ffi::AnyBuffer kernel, ffi::AnyBuffer conv, ffi::Buffer<ffi::F32> recurrent, ffi::Buffer<ffi::S32> layer,
                          ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> request_slots, ffi::Buffer<ffi::PRED> fresh,
                          ffi::Result<ffi::Buffer<ffi::F32>> read, ffi::Result<ffi::AnyBuffer> conv_written,
                          ffi::Result<ffi::Buffer<ffi::F32>> recurrent_written, int64_t key_heads, bool by_channel) {
  const auto rows = mixed.dimensions(), taps = kernel.dimensions(), old = conv.dimensions(), states = recurrent.dimensions();
  const DeltaShape shape{rows[0], int64_t(request_slots.element_count()), states[1], key_heads, states[2], states[3], states[4], taps[1],
                         layer.typed_data()[0], by_channel};
  const int64_t rates = shape.tokens * shape.value_heads;
  if (conv.untyped_data() != conv_written->untyped_data() || recurrent.untyped_data() != recurrent_written->untyped_data())
    return ffi::Error::Internal("the states were copied");
  if (conv.element_type() != mixed.element_type()) return mismatch("inputs and state of the convolution have one dtype");
  if (key_heads < 1 || shape.value_heads % key_heads != 0 || rows[1] != shape.channels() || taps[0] != rows[1] || taps[1] < 2 ||
      old[0] != states[0] || old[1] != states[1] || old[2] != taps[1] - 1 || old[3] != rows[1] ||
      int64_t(decay.element_count()) != shape.tokens * shape.decays() || int64_t(beta.element_count()) != rates ||
      int64_t(read->element_count()) != rates * shape.value_dim || int64_t(query_starts.element_count()) != shape.requests + 1 ||
      int64_t(fresh.element_count()) != shape.requests)
    return mismatch(
        "inputs are [N, Q], decays [N, H] or [N, H * K], rates [N, H], the kernel [Q, W], states [L, S, W - 1, Q] and [L, S, H, K, V]");
  if (shape.layer < 0 || shape.layer >= states[0]) return ffi::Error::InvalidArgument("the layer is outside the states");
  const int32_t *starts = query_starts.typed_data(), *slots = request_slots.typed_data();
  std::vector<bool> used(shape.slots);
  for (int64_t b = 0; b < shape.requests; b++) {
    if (starts[b] < 0 || starts[b + 1] < starts[b] || starts[b + 1] > shape.tokens) return ffi::Error::InvalidArgument("query_starts are outside the step");
    if (starts[b + 1] == starts[b]) continue;
    if (slots[b] < 0 || slots[b] >= shape.slots || used[slots[b]]) return ffi::Error::InvalidArgument("each request has a state of its own");
    used[slots[b]] = true;
  }
  if (starts[0] != 0) return ffi::Error::InvalidArgument("query_starts are outside the step");
  LentScratch lent;
  const float* wide_kernel = nullptr;
  const ffi::Error known = dispatch_dtype(kernel.element_type(), [&](auto type) {
    wide_kernel = as_floats(*lent.operator->(), at<decltype(type)>(kernel), kernel.element_count());
    return ffi::Error::Success();
  });
  if (known.failure()) return known;
  Team team(pool);
  return dispatch_dtype(mixed.element_type(), [&](auto type) {
    using X = decltype(type);
    const DeltaStep<X> step{at<X>(mixed), wide_kernel, decay.typed_data(), beta.typed_data(), starts, slots, fresh.typed_data(),
                            at<X>(conv_written), recurrent_written->typed_data()};
    delta_rule(team, shape, step, read->typed_data());
    return ffi::Error::Success();
  });
}

}  // namespace rex
