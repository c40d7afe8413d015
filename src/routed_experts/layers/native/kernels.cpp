// The XLA FFI handlers: check shapes and dtypes, then call the kernels in the headers beside this file.
#include "attention_handlers.h"
#include "delta_handlers.h"
#include "experts.h"
#include "handlers.h"
#include "head_handlers.h"
#include "host_expert_handlers.h"
#include "linear.h"
#include "qk_norm_rope.h"
#include "bf16_gains.h"
#include "router_handlers.h"
#include "row_handlers.h"
#include "layer_stack_handler.h"
#include "select.h"

namespace rex {

ffi::Error run_experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                       ffi::Buffer<ffi::PRED> valid, ffi::AnyBuffer gate_up_numbers, ffi::AnyBuffer gate_up_scales, ffi::AnyBuffer down_numbers,
                       ffi::AnyBuffer down_scales, ffi::Buffer<ffi::S32> first, ffi::AnyBuffer gate_up_bias, ffi::AnyBuffer down_bias,
                       ffi::Result<ffi::AnyBuffer> y, int64_t num_experts, int64_t activation, int64_t gate_up_group, int64_t down_group) {
  Matrices gate_up{gate_up_numbers, gate_up_scales, gate_up_group}, down{down_numbers, down_scales, down_group};
  const auto rows = x.dimensions(), chosen = ids.dimensions();
  const int64_t stacked = down.dim(0);
  const ExpertShape shape{rows[0], chosen[1], rows[1], down.dim(1), num_experts, first.typed_data()[0], false, Activation(activation)};
  const int64_t biases[] = {int64_t(gate_up_bias.element_count()), int64_t(down_bias.element_count())};
  const ffi::DataType dtype = gate_up_bias.element_type();  // of the model
  if ((down_numbers.element_type() != gate_up_numbers.element_type() && !(gate_up.coded() && down.coded())) || y->element_type() != x.element_type())
    return mismatch("gate_up and down have one dtype or are both codes, and x and y have one dtype");
  if (gate_up.dim(0) != stacked || gate_up.dim(1) != shape.hidden || gate_up.dim(2) != 2 * shape.width || down.dim(2) != shape.hidden)
    return mismatch("gate_up is [RE, D, 2F] and down [RE, F, D]");
  if (chosen[0] != shape.tokens || weights.element_count() != ids.element_count() || int64_t(valid.element_count()) != shape.tokens)
    return mismatch("ids and weights are [N, K] and valid [N]");
  if (shape.first < 0 || shape.first + num_experts > stacked) return ffi::Error::InvalidArgument("the layer is outside the stack");
  for (const auto& [stack, name] : {std::pair(gate_up, "gate_up"), std::pair(down, "down")})
    if (const std::string fault = scales_fault(stack, name); !fault.empty()) return mismatch(fault);
  if (down_bias.element_type() != dtype || (!gate_up.coded() && gate_up_numbers.element_type() != dtype) ||
      (biases[0] != 0 && biases[0] != stacked * 2 * shape.width) || (biases[1] != 0 && biases[1] != stacked * shape.hidden))
    return mismatch("biases are [RE, 2F] and [RE, D], or [0], of the dtype of the model, which experts have that are not codes");
  if (activation < 0 || activation > int64_t(Activation::kTanhGelu)) return ffi::Error::InvalidArgument("no such activation");
  Team team(pool);
  return dispatch_rows(x.element_type(), dtype, [&](auto row, auto type) {
    using X = decltype(row);
    using T = decltype(type);
    auto run = [&](auto first_stack, auto second_stack) {
      return experts(team, shape, at<X>(x), ids.typed_data(), weights.typed_data(), valid.typed_data(), first_stack, second_stack, at<X>(y),
                     ExpertBiases<T>{biases[0] ? at<T>(gate_up_bias) : nullptr, biases[1] ? at<T>(down_bias) : nullptr});
    };
    const bool known = gate_up.coded() ? run(gate_up.codes(), down.codes()) : run(gate_up.plain<T>(), down.plain<T>());
    return known ? ffi::Error::Success() : ffi::Error::InvalidArgument("an expert id is outside 0..num_experts-1");
  });
}

// `exact`: rows are not rounded to bfloat16, as weights of bfloat16 have them rounded, and codes of a model of that dtype.
ffi::Error run_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer numbers, ffi::AnyBuffer scales, ffi::Buffer<ffi::S32> layer,
                      ffi::Result<ffi::AnyBuffer> y, bool exact, int64_t group) {
  Matrices weights{numbers, scales, group};
  const auto rows = x.dimensions();
  const int64_t index = layer.typed_data()[0], depth = weights.dim(1), cols = weights.dim(2);
  if (rows[1] != depth) return mismatch("x is [N, D] and weights are [R, D, O]");
  if (index < 0 || index >= weights.dim(0)) return ffi::Error::InvalidArgument("the layer is outside the stack");
  if (const std::string fault = scales_fault(weights, "weights"); !fault.empty()) return mismatch(fault);
  Team team(pool);
  auto run = [&](auto row, auto stacked) {
    return dispatch_dtype(y->element_type(), [&](auto out) {
      linear(team, rows[0], depth, cols, at<decltype(row)>(x), matrix_of(stacked, index, depth, cols), at<decltype(out)>(y), exact);
      return ffi::Error::Success();
    });
  };
  if (weights.coded()) return dispatch_dtype(x.element_type(), [&](auto row) { return run(row, weights.codes()); });
  return dispatch_rows(x.element_type(), numbers.element_type(), [&](auto row, auto type) { return run(row, weights.plain<decltype(type)>()); });
}

// `cache` is returned as `written`, the same memory; `kv_scales` [2]: of keys and values of a layer of codes.
ffi::Error run_qk_norm_rope(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::S32> layer,
                       ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> first_page,
                       ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::PRED> valid,
                       ffi::Buffer<ffi::S32> page_table, std::optional<ffi::Buffer<ffi::F32>> kv_scales, ffi::Result<ffi::AnyBuffer> queries,
                       ffi::Result<ffi::AnyBuffer> written, float eps) {
  const auto q = queries->dimensions(), kv = cache.dimensions(), table = page_table.dimensions(), norms = q_norm.dimensions();
  QkNormRopeShape shape{q[0], q[1], kv[2] / 2, q[2], table[1], kv[1], first_page.typed_data()[0], layer.typed_data()[0], eps, q[2]};
  if (kv_scales.has_value()) {
    if (kv_scales->element_count() != 2 || cache.element_type() != ffi::U8) return mismatch("scales of keys and values are [2], of a pool of codes");
    shape.kv_scales = {kv_scales->typed_data()[0], kv_scales->typed_data()[1]};
  }
  if (cache.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the KV pool was copied");
  if (kv[3] != q[2]) return ffi::Error::InvalidArgument("the pool's rows must be as wide as a head");
  if (k_norm.element_type() != q_norm.element_type() || queries->element_type() != qkv.element_type() || norms[1] != q[2] || k_norm.dimensions()[1] != q[2] ||
      int64_t(qkv.element_count()) != q[0] * (q[1] + kv[2]) * q[2] || int64_t(positions.element_count()) != q[0])
    return mismatch("qkv [N, (H + 2G) C] and queries have one dtype, and norms [R, C]");
  if (int64_t(token_rows.element_count()) != q[0] || int64_t(valid.element_count()) != q[0]) return mismatch("token_rows and valid are [N]");
  if (!writable(positions, token_rows, valid, page_table, kv[1], shape.first_page, kv[0])) return ffi::Error::InvalidArgument(kOutsidePool);
  if (shape.layer < 0 || shape.layer >= norms[0]) return ffi::Error::InvalidArgument("the layer is outside the stack");
  Team team(pool);
  return dispatch_rows(qkv.element_type(), q_norm.element_type(), [&](auto row, auto type) {
    using X = decltype(row);
    using T = decltype(type);
    const QkNormRopeInputs<X, T> inputs{at<X>(qkv), at<T>(q_norm), at<T>(k_norm), cos.typed_data(), sin.typed_data(),
                                        positions.typed_data(), token_rows.typed_data(), page_table.typed_data(), valid.typed_data()};
    return dispatch_pool(cache.element_type(), [&](auto stored) {
      qk_norm_rope(team, shape, inputs, at<X>(queries), at<decltype(stored)>(written));
      return ffi::Error::Success();
    });
  });
}

// The same of layers with traits (qk_prepare.h), from rows of floats; norms are [R, C], or [R, H C] and [R, G C], or [0]. A row of `cos` has
// at least `frequencies` numbers, of which the first ones are read.
ffi::Error run_qk_prepare(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::S32> layer,
                          ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> first_page,
                          ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::PRED> valid,
                          ffi::Buffer<ffi::S32> page_table, std::optional<ffi::Buffer<ffi::F32>> kv_scales,
                          ffi::Result<ffi::Buffer<ffi::F32>> queries, ffi::Result<ffi::AnyBuffer> written, float eps, float norm_offset,
                          int64_t norm, int64_t frequencies, bool interleaved, bool gated, bool norm_after_rope, bool biased) {
  const auto q = queries->dimensions(), kv = cache.dimensions(), table = page_table.dimensions();
  const int64_t tokens = q[0], heads = q[1], dim = q[2], groups = kv[2] / 2, repeat = layer.typed_data()[0];
  const int64_t angles = cos.dimensions().size() == 2 ? cos.dimensions()[1] : 0;
  QkNormRopeShape shape{tokens, heads, groups, dim, table[1], kv[1], first_page.typed_data()[0], 0, eps, angles};
  const QkTraits traits{QkNorm(norm), norm_offset, frequencies, interleaved, gated, norm_after_rope, biased};
  const bool whole = traits.norm == QkNorm::kWhole, none = traits.norm == QkNorm::kNone;
  const int64_t q_width = none ? 0 : (whole ? heads : 1) * dim, k_width = none ? 0 : (whole ? groups : 1) * dim;
  if (kv_scales.has_value()) {
    if (kv_scales->element_count() != 2 || cache.element_type() != ffi::U8) return mismatch("scales of keys and values are [2], of a pool of codes");
    shape.kv_scales = {kv_scales->typed_data()[0], kv_scales->typed_data()[1]};
  }
  if (cache.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the KV pool was copied");
  if (kv[3] != dim) return ffi::Error::InvalidArgument("the pool's rows must be as wide as a head");
  if (norm < 0 || norm > int64_t(QkNorm::kWhole) || frequencies < 0 || 2 * frequencies > dim || angles < frequencies || int64_t(cos.element_count()) != tokens * angles ||
      sin.element_count() != cos.element_count())
    return mismatch("the norm is one of QkNorm, and a row has the angles of at most C / 2 frequencies");
  if (int64_t(qkv.element_count()) != tokens * (heads * (gated ? 2 : 1) + 2 * groups) * dim || int64_t(positions.element_count()) != tokens ||
      int64_t(token_rows.element_count()) != tokens || int64_t(valid.element_count()) != tokens)
    return mismatch("qkv is [N, (H + 2G) C], of gated heads [N, (2H + 2G) C]; positions, token_rows and valid are [N]");
  const int64_t repeats = none ? 1 : q_norm.dimensions()[0];
  if (k_norm.element_type() != q_norm.element_type() || (!none && (int64_t(q_norm.element_count()) != repeats * q_width || int64_t(k_norm.element_count()) != repeats * k_width)))
    return mismatch("norms are [R, C], of whole projections [R, H C] and [R, G C]");
  if (!writable(positions, token_rows, valid, page_table, kv[1], shape.first_page, kv[0])) return ffi::Error::InvalidArgument(kOutsidePool);
  if (repeat < 0 || (!none && repeat >= repeats)) return ffi::Error::InvalidArgument("the layer is outside the stack");
  Team team(pool);
  return dispatch_dtype(q_norm.element_type(), [&](auto type) {
    using T = decltype(type);
    const QkArrays<T> arrays{none ? nullptr : at<T>(q_norm) + repeat * q_width, none ? nullptr : at<T>(k_norm) + repeat * k_width, nullptr};
    const QkNormRopeInputs<float, T> inputs{qkv.typed_data(), nullptr, nullptr, cos.typed_data(), sin.typed_data(),
                                            positions.typed_data(), token_rows.typed_data(), page_table.typed_data(), valid.typed_data()};
    return dispatch_pool(cache.element_type(), [&](auto stored) {
      qk_prepare(team, shape, traits, arrays, inputs, queries->typed_data(), at<decltype(stored)>(written));
      return ffi::Error::Success();
    });
  });
}

// `mixed` [N, H, C] is returned as `gated`, the same memory; `qkv` has a gate beside each query.
ffi::Error run_gate_heads(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> mixed, ffi::Result<ffi::Buffer<ffi::F32>> gated,
                          int64_t groups) {
  const auto rows = mixed.dimensions();
  if (mixed.untyped_data() != gated->untyped_data()) return ffi::Error::Internal("the mixed values were copied");
  if (groups < 1 || int64_t(qkv.element_count()) != rows[0] * (2 * rows[1] + 2 * groups) * rows[2])
    return mismatch("qkv is [N, (2H + 2G) C] beside values [N, H, C]");
  QkNormRopeShape shape{};
  shape.tokens = rows[0], shape.heads = rows[1], shape.groups = groups, shape.dim = rows[2];
  Team team(pool);
  gate_heads<float>(team, shape, qkv.typed_data(), nullptr, gated->typed_data());
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

// Scratch of calls that is kept for later calls, in bytes.
extern "C" int64_t RexScratchBytes() { return rex::LentScratch::bytes(); }

// Called by toolchain.py when the library is loaded.
extern "C" void RexBf16Gains(double* pairs, double* tiles) {
  const rex::Bf16Gains gains = rex::measure_bf16_gains();
  *pairs = gains.pairs, *tiles = gains.tiles;
}
extern "C" bool RexUseBf16(bool pairs, bool tiles) { return rex::use_bf16(pairs, tiles); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexExperts, rex::run_experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_experts")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("gate_up_group")
                                  .Attr<int64_t>("down_group"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLinear, rex::run_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("exact")
                                  .Attr<int64_t>("group"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexAttention, rex::run_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("latent")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexKvWrite, rex::run_kv_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLatentAttention, rex::run_latent_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("interleaved")
                                  .Attr<float>("scale")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexNorm, rex::run_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexGate, rex::run_gate,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int64_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexAddGated, rex::run_add_gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

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
                                  .OptionalArg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexQkPrepare, rex::run_qk_prepare,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
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
                                  .OptionalArg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("norm_offset")
                                  .Attr<int64_t>("norm")
                                  .Attr<int64_t>("frequencies")
                                  .Attr<bool>("interleaved")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("norm_after_rope")
                                  .Attr<bool>("biased"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexGateHeads, rex::run_gate_heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("groups"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexRouter, rex::run_router,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("scoring")
                                  .Attr<bool>("renormalize")
                                  .Attr<float>("scale")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("jitter_eps")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<int64_t>("topk_group")
                                  .Attr<int64_t>("group_score_topk"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexRecordingRouter, rex::run_recording_router,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int64_t>("scoring")
                                  .Attr<bool>("renormalize")
                                  .Attr<float>("scale")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("jitter_eps")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<int64_t>("topk_group")
                                  .Attr<int64_t>("group_score_topk"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexDeltaRule, rex::run_delta_rule,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("key_heads")
                                  .Attr<bool>("by_channel"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLayerStack, rex::run_layer_stack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("pattern")
                                  .Attr<int64_t>("first_layer")
                                  .Attr<int64_t>("first_column")
                                  .Attr<int64_t>("layer_pages")
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("eps")
                                  .Attr<float>("norm_offset")
                                  .Attr<float>("residual_scale")
                                  .Attr<int64_t>("scoring")
                                  .Attr<bool>("renormalize")
                                  .Attr<float>("scale")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("jitter_eps")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<int64_t>("topk_group")
                                  .Attr<int64_t>("group_score_topk"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexArgmax, rex::run_argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexLogprobs, rex::run_logprobs,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(RexTiedLinear, rex::run_tied_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
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
