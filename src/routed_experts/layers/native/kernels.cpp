// The XLA FFI handlers: check shapes and dtypes, then call the kernels in the headers beside this file.
#include "attention.h"
#include "argmax.h"
#include "experts.h"
#include "handlers.h"
#include "host_expert_handlers.h"
#include "linear.h"
#include "qk_norm_rope.h"
#include "router.h"
#include "layer_stack_handler.h"
#include "select.h"

namespace rex {

ffi::Error run_experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                       ffi::Buffer<ffi::PRED> valid, ffi::AnyBuffer gate_up, ffi::AnyBuffer down, ffi::Buffer<ffi::S32> first,
                       ffi::Result<ffi::AnyBuffer> y, int64_t num_experts) {
  const auto rows = x.dimensions(), chosen = ids.dimensions(), second = down.dimensions();
  const ExpertShape shape{rows[0], chosen[1], rows[1], second[1], num_experts, first.typed_data()[0]};
  const auto wide = gate_up.dimensions();
  if (x.element_type() != gate_up.element_type() || down.element_type() != gate_up.element_type() || y->element_type() != x.element_type())
    return mismatch("x, gate_up, down and y have one dtype");
  if (wide[0] != second[0] || wide[1] != shape.hidden || wide[2] != 2 * shape.width || second[2] != shape.hidden)
    return mismatch("gate_up is [RE, D, 2F] and down [RE, F, D]");
  if (chosen[0] != shape.tokens || weights.element_count() != ids.element_count() || int64_t(valid.element_count()) != shape.tokens)
    return mismatch("ids and weights are [N, K] and valid [N]");
  if (shape.first < 0 || shape.first + num_experts > second[0]) return ffi::Error::InvalidArgument("the layer is outside the stack");
  Team team(pool);
  return dispatch_dtype(gate_up.element_type(), [&](auto type) {
    using T = decltype(type);
    const bool known = experts<T>(team, shape, at<T>(x), ids.typed_data(), weights.typed_data(), valid.typed_data(), at<T>(gate_up),
                                  at<T>(down), at<T>(y));
    return known ? ffi::Error::Success() : ffi::Error::InvalidArgument("an expert id is outside 0..num_experts-1");
  });
}

ffi::Error run_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Buffer<ffi::S32> layer,
                      ffi::Result<ffi::AnyBuffer> y) {
  const auto rows = x.dimensions(), stack = weights.dimensions();
  const int64_t index = layer.typed_data()[0];
  if (x.element_type() != weights.element_type() || rows[1] != stack[1]) return mismatch("x is [N, D] and weights [R, D, O] of one dtype");
  if (index < 0 || index >= stack[0]) return ffi::Error::InvalidArgument("the layer is outside the stack");
  Team team(pool);
  return dispatch_dtype(weights.element_type(), [&](auto type) {
    using T = decltype(type);
    const T* matrix = at<T>(weights) + index * stack[1] * stack[2];
    return dispatch_dtype(y->element_type(), [&](auto out) {
      linear(team, rows[0], rows[1], stack[2], at<T>(x), matrix, at<decltype(out)>(y));
      return ffi::Error::Success();
    });
  });
}

ffi::Error run_attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> first_page,
                         ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> page_table,
                         ffi::Result<ffi::AnyBuffer> out) {
  const auto q = queries.dimensions(), kv = cache.dimensions(), table = page_table.dimensions();
  const AttentionShape shape{q[0], q[1], kv[2] / 2, q[2], table[0], table[1], kv[1], kv[3]};
  const PagedStep step{positions.typed_data(), query_starts.typed_data(), page_table.typed_data(), first_page.typed_data()[0]};
  if (out->element_type() != queries.element_type() || kv[3] < q[2] || int64_t(positions.element_count()) != q[0] ||
      int64_t(query_starts.element_count()) != table[0] + 1)
    return mismatch("queries and their result have one dtype; positions are [N], query_starts [B + 1]");
  for (int64_t b = 0; b < shape.requests; b++) {
    const int64_t begin = step.query_starts[b], end = step.query_starts[b + 1];
    if (begin < 0 || end < begin || end > shape.tokens || (end > begin && step.positions[end - 1] >= shape.pages * shape.page))
      return ffi::Error::InvalidArgument("query_starts or positions are outside the step or its page table");
  }
  Team team(pool);
  return dispatch_dtype(queries.element_type(), [&](auto query) {
    using Q = decltype(query);
    return dispatch_dtype(cache.element_type(), [&](auto stored) {
      using T = decltype(stored);
      attention(team, shape, step, at<Q>(queries), at<T>(cache), at<Q>(out));
      return ffi::Error::Success();
    });
  });
}

// `cache` is returned as `written`, the same memory.
ffi::Error run_qk_norm_rope(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::S32> layer,
                       ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> first_page,
                       ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::PRED> valid,
                       ffi::Buffer<ffi::S32> page_table, ffi::Result<ffi::AnyBuffer> queries, ffi::Result<ffi::AnyBuffer> written,
                       float eps) {
  const auto q = queries->dimensions(), kv = cache.dimensions(), table = page_table.dimensions(), norms = q_norm.dimensions();
  const QkNormRopeShape shape{q[0], q[1], kv[2] / 2, q[2], table[1], kv[1], first_page.typed_data()[0], layer.typed_data()[0], eps};
  if (cache.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the KV pool was copied");
  if (kv[3] != q[2]) return ffi::Error::InvalidArgument("the pool's rows must be as wide as a head");
  if (q_norm.element_type() != qkv.element_type() || k_norm.element_type() != qkv.element_type() ||
      queries->element_type() != qkv.element_type() || norms[1] != q[2] || k_norm.dimensions()[1] != q[2] ||
      int64_t(qkv.element_count()) != q[0] * (q[1] + kv[2]) * q[2] || int64_t(positions.element_count()) != q[0])
    return mismatch("qkv [N, (H + 2G) C], norms [R, C] and queries have one dtype");
  for (int64_t n = 0; n < shape.tokens; n++)
    if (valid.typed_data()[n] && (positions.typed_data()[n] < 0 || positions.typed_data()[n] >= shape.pages * shape.page))
      return ffi::Error::InvalidArgument("a position is outside the page table");
  if (shape.layer < 0 || shape.layer >= norms[0]) return ffi::Error::InvalidArgument("the layer is outside the stack");
  Team team(pool);
  return dispatch_dtype(qkv.element_type(), [&](auto type) {
    using T = decltype(type);
    const QkNormRopeInputs<T, T> inputs{at<T>(qkv), at<T>(q_norm), at<T>(k_norm), cos.typed_data(), sin.typed_data(),
                                  positions.typed_data(), token_rows.typed_data(), page_table.typed_data(), valid.typed_data()};
    return dispatch_dtype(cache.element_type(), [&](auto stored) {
      qk_norm_rope(team, shape, inputs, at<T>(queries), at<decltype(stored)>(written));
      return ffi::Error::Success();
    });
  });
}

ffi::Error run_router(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Result<ffi::Buffer<ffi::S32>> ids,
                      ffi::Result<ffi::Buffer<ffi::F32>> weights, bool renormalize) {
  const auto rows = logits.dimensions();
  const RouterShape shape{rows[0], rows[1], ids->dimensions()[1], renormalize, rows[0]};
  Team team(pool);
  route(team, shape, logits.typed_data(), ReplayRows{}, ids->typed_data(), weights->typed_data(), nullptr);
  return ffi::Error::Success();
}

// `block` is returned as `written`, the same memory.
ffi::Error run_recording_router(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> block,
                                ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::Buffer<ffi::S32>> ids,
                                ffi::Result<ffi::Buffer<ffi::F32>> weights,
                                ffi::Result<ffi::Buffer<ffi::S32>> written, bool renormalize) {
  const auto rows = logits.dimensions();
  const RouterShape shape{rows[0], rows[1], ids->dimensions()[1], renormalize, rows[0]};
  const int64_t first = layer.typed_data()[0] * shape.top_k;
  if (block.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the block of ids was copied");
  if (first < 0 || first + shape.top_k > block.dimensions()[0]) return ffi::Error::InvalidArgument("the layer is outside the block");
  Team team(pool);
  int32_t* column = written->typed_data() + first * shape.tokens;
  route(team, shape, logits.typed_data(), ReplayRows{}, ids->typed_data(), weights->typed_data(), column);
  return ffi::Error::Success();
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

ffi::Error run_select(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> capacity,
                      ffi::Buffer<ffi::S32> source, ffi::Buffer<ffi::PRED> valid, ffi::Result<ffi::Buffer<ffi::S32>> ids,
                      ffi::Result<ffi::Buffer<ffi::S32>> instances, ffi::Result<ffi::Buffer<ffi::S32>> rerouted,
                      ffi::Result<ffi::Buffer<ffi::S32>> overflowed, bool overflows) {
  const auto rows = scores.dimensions(), table = order.dimensions();
  const int64_t count = capacity.element_count(), chosen = ids->dimensions()[1];
  const SelectShape shape{rows[0], rows[1], chosen, table[0], table[2], count, overflows};
  const int32_t *first = order.typed_data(), *last = first + order.element_count(), *from = source.typed_data();
  if (table[1] != shape.experts || int64_t(source.element_count()) != shape.tokens || int64_t(valid.element_count()) != shape.tokens)
    return mismatch("scores are [N, E], replica_order [V, E, J], source and valid [N]");
  if (std::any_of(first, last, [&](int32_t i) { return i < -1 || i >= count; }))
    return ffi::Error::InvalidArgument("replica_order names an instance that has no capacity");
  if (std::any_of(from, from + shape.tokens, [&](int32_t v) { return v < 0 || v >= shape.sources; }))
    return ffi::Error::InvalidArgument("source names a row that replica_order has not");
  Team team(pool);
  const SelectInput input{scores.typed_data(), first, capacity.typed_data(), from, valid.typed_data()};
  select(team, shape, input, {ids->typed_data(), instances->typed_data(), rerouted->typed_data(), overflowed->typed_data()});
  return ffi::Error::Success();
}

}  // namespace rex

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexExperts, rex::run_experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_experts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLinear, rex::run_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexAttention, rex::run_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexQkNormRope, rex::run_qk_norm_rope,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexRouter, rex::run_router,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("renormalize"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexRecordingRouter, rex::run_recording_router,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<bool>("renormalize"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLayerStack, rex::run_layer_stack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("first_layer")
                                  .Attr<int64_t>("first_column")
                                  .Attr<int64_t>("layer_pages")
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("eps")
                                  .Attr<bool>("renormalize"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexArgmax, rex::run_argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexSelect, rex::run_select,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<bool>("overflows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexSubmitHostJob, rex::submit_on_cpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("top_k"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexWaitHostSums, rex::wait_sums_on_cpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue")
                                  .Attr<int64_t>("kind"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexWaitHostWeights, rex::wait_weights_on_cpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexSubmitHostJobOnGpu, rex::submit_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("top_k"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexWaitHostSumsOnGpu, rex::wait_sums_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue")
                                  .Attr<int64_t>("kind"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexWaitHostWeightsOnGpu, rex::wait_weights_on_gpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("queue"));
