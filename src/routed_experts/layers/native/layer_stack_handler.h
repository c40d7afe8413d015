// The handler of a stack of layers: names its arrays and checks their dtypes and shapes.
#pragma once
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "attention_handlers.h"
#include "handlers.h"
#include "layer_stack.h"
#include "router_handlers.h"

namespace rex {

// Arguments and results in order: those of the step, those of each layer of the pattern, and where rows are recorded a block of ids and
// perhaps one of combine weights, which are last on both sides; rows to replay come after them, two arrays, and then the scales of a pool of
// codes [L, 2], of the keys and values of all layers of the pool. An array that the layers do not have is [0].
// Scales of the matrices that may be codes are last in a layer, in the order of kMatrices; their groups are last among its traits.
enum StackArg { kX, kNextNorm, kCos, kSin, kPositions, kTokenRows, kValid, kQueryStarts, kPageTable, kTraits, kNumbers, kCache, kLayers };
enum LayerArg { kInputNorm, kPostNorm, kQNorm, kKNorm, kQkv, kQkvBias, kOut, kOutBias, kSinks, kRouter, kRouterBias, kSelectionBias, kGateUp,
                kDown, kGateUpBias, kDownBias, kSharedGateUp, kSharedDown, kSharedGate, kScales };
constexpr const char* kStackArgNames[] = {"x", "next_norm", "cos", "sin", "positions", "token_rows", "valid", "query_starts", "page_table"};
constexpr const char* kLayerArgNames[] = {"input_norm", "post_norm", "q_norm", "k_norm", "qkv", "qkv_bias", "out", "out_bias", "sinks", "router",
                                          "router_bias", "selection_bias", "gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up",
                                          "shared_down", "shared_gate"};
constexpr LayerArg kMatrices[] = {kQkv, kOut, kGateUp, kDown, kSharedGateUp, kSharedDown};
constexpr int kNumMatrices = std::size(kMatrices), kLayerArgs = kScales + kNumMatrices;
enum StackResult { kStream, kNormed, kWritten, kIdsWritten, kWeightsWritten };
enum LayerTrait { kQkNorm, kRotary, kInterleaved, kGated, kNormAfterRope, kWindow, kChunk, kActivation, kGroups };  // of layers/stack_traits.py
constexpr int kNumTraits = kGroups + kNumMatrices;
enum LayerNumber { kScoreScale, kQkNormOffset, kNumNumbers };

struct StackBuffers {
  std::vector<ffi::AnyBuffer> args, rets;
  int64_t pattern;
  StackBuffers(ffi::RemainingArgs& arguments, ffi::RemainingRets& results, int64_t pattern) : pattern(pattern) {
    for (size_t i = 0; i < arguments.size(); i++) args.push_back(*arguments.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); i++) rets.push_back(**results.get<ffi::AnyBuffer>(i));
  }
  int64_t block() const { return kLayers + pattern * kLayerArgs; }
  int64_t layer(int64_t position, int arg) const { return kLayers + position * kLayerArgs + arg; }
  bool complete() const {
    return pattern > 0 && rets.size() > kWritten && int64_t(args.size()) >= replay_ids() && is(kTraits, {pattern, kNumTraits}) && is(kNumbers, {pattern, kNumNumbers}) &&
           args[kTraits].element_type() == ffi::S32 && args[kNumbers].element_type() == ffi::F32 && args[kValid].element_type() == ffi::PRED;
  }
  bool sparse(int64_t position) const { return has(layer(position, kRouter)); }
  int64_t num_sparse() const {
    int64_t count = 0;
    for (int64_t position = 0; position < pattern; position++) count += sparse(position);
    return count;
  }
  // A dim of an array of the first layer with experts, 0 where there is none.
  int64_t sparse_dim(int arg, int axis) const {
    for (int64_t position = 0; position < pattern; position++)
      if (sparse(position)) return dim(layer(position, arg), axis);
    return 0;
  }
  bool records() const { return rets.size() > kIdsWritten; }
  bool records_weights() const { return rets.size() > kWeightsWritten; }
  int64_t replay_ids() const { return block() + int64_t(rets.size()) - kIdsWritten; }
  int64_t num_after_blocks() const { return int64_t(args.size()) - replay_ids(); }
  bool replays() const { return num_after_blocks() >= 2; }
  bool has_kv_scales() const { return num_after_blocks() % 2 == 1; }
  int64_t kv_scales() const { return int64_t(args.size()) - 1; }  // the last argument, where it is there
  ReplayRows replay() { return replays() ? ReplayRows{in<int32_t>(replay_ids()), in<bool>(replay_ids() + 1)} : ReplayRows{}; }
  // Null where nothing is recorded.
  StackRecord record() {
    return {records() ? out<int32_t>(kIdsWritten) : nullptr, records_weights() ? out<float>(kWeightsWritten) : nullptr};
  }
  // Whether the blocks are the caller's own memory.
  bool records_in_place() {
    return (!records() || in<void>(block()) == out<void>(kIdsWritten)) &&
           (!records_weights() || in<void>(block() + 1) == out<void>(kWeightsWritten));
  }
  // Of an array of a layer, whose bytes may hold two codes; a pool of bytes holds one number each.
  int64_t dim(int64_t arg, int axis) const {
    return arg >= kLayers && arg < block() ? logical_dim(args[arg], axis) : args[arg].dimensions()[axis];
  }
  std::vector<int64_t> dims(int64_t arg) const {
    std::vector<int64_t> all;
    for (size_t axis = 0; axis < args[arg].dimensions().size(); axis++) all.push_back(dim(arg, axis));
    return all;
  }
  bool has(int64_t arg) const { return args[arg].element_count() != 0; }
  bool is(int64_t arg, std::initializer_list<int64_t> dims) const {
    const auto have = args[arg].dimensions();
    return have.size() == dims.size() && std::equal(have.begin(), have.end(), dims.begin());
  }
  template <class T>
  T* in(int64_t arg) { return has(arg) ? at<T>(args[arg]) : nullptr; }
  template <class T>
  T* out(int ret) { return at<T>(rets[ret]); }

  // The traits of a layer of the pattern; `frequencies` of the angles.
  LayerTraits traits(int64_t position, int64_t frequencies) {
    const int32_t* own = at<int32_t>(args[kTraits]) + position * kNumTraits;
    const float* numbers = at<float>(args[kNumbers]) + position * kNumNumbers;
    LayerTraits traits{};
    traits.qk = {QkNorm(own[kQkNorm]), numbers[kQkNormOffset], own[kRotary] ? frequencies : 0, own[kInterleaved] != 0, own[kGated] != 0,
                 own[kNormAfterRope] != 0};
    traits.window = own[kWindow], traits.chunk = own[kChunk], traits.scale = numbers[kScoreScale];
    traits.activation = Activation(own[kActivation]);
    traits.sparse = sparse(position), traits.wide_router = args[layer(position, kRouter)].element_type() == ffi::F32;
    for (int64_t before = 0; before < position; before++) traits.sparse_before += sparse(before);
    const int64_t shared = layer(position, kSharedDown);
    traits.shared_width = has(shared) ? dim(shared, 1) : 0;
    return traits;
  }

  // One of kMatrices, of a layer of the pattern.
  Matrices matrices(int64_t position, int index) const {
    const int64_t group = static_cast<const int32_t*>(args[kTraits].untyped_data())[position * kNumTraits + kGroups + index];
    return {args[layer(position, kMatrices[index])], args[layer(position, kScales + index)], group};
  }

  template <class T>
  LayerArrays<T> arrays(int64_t position) {
    auto of = [&](int arg) { return in<T>(layer(position, arg)); };
    auto stack = [&](LayerArg arg) {
      Matrices all = matrices(position, std::find(kMatrices, std::end(kMatrices), arg) - kMatrices);
      return all.coded() ? WeightStack<T>{nullptr, all.codes()} : WeightStack<T>{all.plain<T>(), {}};
    };
    LayerArrays<T> w{};
    w.input_norm = of(kInputNorm), w.post_norm = of(kPostNorm), w.q_norm = of(kQNorm), w.k_norm = of(kKNorm), w.qkv = stack(kQkv);
    w.qkv_bias = of(kQkvBias), w.out = stack(kOut), w.out_bias = of(kOutBias), w.router_bias = of(kRouterBias), w.gate_up = stack(kGateUp);
    w.down = stack(kDown), w.gate_up_bias = of(kGateUpBias), w.down_bias = of(kDownBias), w.shared_gate_up = stack(kSharedGateUp);
    w.shared_down = stack(kSharedDown), w.shared_gate = of(kSharedGate), w.router = in<void>(layer(position, kRouter));
    w.sinks = in<float>(layer(position, kSinks)), w.selection_bias = in<float>(layer(position, kSelectionBias));
    return w;
  }

  // What an array must be; `optional`: or [0].
  struct Expected {
    int arg;
    std::vector<int64_t> dims;
    bool optional = false;
  };

  // The first array that is something else, with both shapes; "" if there is none. `first`: of these arrays among the arguments.
  std::string misfit(const std::vector<Expected>& all, int64_t first, const char* const* names, const std::string& of) const {
    for (const Expected& expected : all) {
      const std::vector<int64_t> have = dims(first + expected.arg);
      if (expected.optional && !has(first + expected.arg)) continue;
      if (have == expected.dims) continue;
      return std::string(names[expected.arg]) + of + " is " + shape_text(have) + ", not " + shape_text(expected.dims);
    }
    return "";
  }

  // The first array of a layer of the pattern that has not the shape that its traits ask for.
  std::string layer_misfit(const StackShape& s, int64_t position, const LayerTraits& traits) const {
    const int64_t d = s.hidden, r = s.repeats(), c = s.dim, projected = s.projected(traits.qk.gated), width = traits.shared_width;
    const int64_t q = traits.qk.norm == QkNorm::kWhole ? s.heads * c : c, k = traits.qk.norm == QkNorm::kWhole ? s.groups * c : c;
    std::vector<Expected> all{{kInputNorm, {r, d}}, {kPostNorm, {r, d}}, {kQkv, {r, d, projected}}, {kQkvBias, {r, projected}, true},
                              {kOut, {r, s.mixed(), d}}, {kOutBias, {r, d}, true}, {kSinks, {r, s.heads}, true}};
    if (traits.sparse)
      all.insert(all.end(), {{kRouter, {r, d, s.experts}}, {kRouterBias, {r, s.experts}, true}, {kSelectionBias, {r, s.experts}, true},
                             {kGateUp, {r * s.experts, d, 2 * s.width}}, {kDown, {r * s.experts, s.width, d}},
                             {kGateUpBias, {r * s.experts, 2 * s.width}, true}, {kDownBias, {r * s.experts, d}, true}});
    else
      for (int arg : {kRouterBias, kSelectionBias, kGateUp, kDown, kGateUpBias, kDownBias, kSharedGate}) all.push_back({arg, {0}});
    if (traits.qk.norm != QkNorm::kNone) all.insert(all.end(), {{kQNorm, {r, q}}, {kKNorm, {r, k}}});
    if (width != 0) all.insert(all.end(), {{kSharedGateUp, {r, d, 2 * width}}, {kSharedDown, {r, width, d}}, {kSharedGate, {r, d, 1}, true}});
    else all.insert(all.end(), {{kSharedDown, {traits.sparse ? 0 : 1}}, {kSharedGate, {0}}});  // [1]: a dense layer has one
    return misfit(all, layer(position, 0), kLayerArgNames, of_position(position));
  }

  std::string of_position(int64_t position) const { return " of layer " + std::to_string(position) + " of the pattern"; }

  // The first matrix of a layer of the pattern that is codes whose scales do not fit, or has scales and is not codes.
  std::string scales_misfit(int64_t position) const {
    for (int index = 0; index < kNumMatrices; index++)
      if (const std::string fault = scales_fault(matrices(position, index), kLayerArgNames[kMatrices[index]] + of_position(position)); !fault.empty())
        return fault;
    return "";
  }

  // The first array of the step that has not the shape that the others ask for.
  std::string step_misfit(const StackShape& s) const {
    const int64_t n = s.tokens;
    return misfit({{kX, {n, s.hidden}}, {kNextNorm, {s.hidden}}, {kCos, {n, s.angles}}, {kSin, {n, s.angles}}, {kPositions, {n}}, {kTokenRows, {n}},
                   {kValid, {n}}, {kQueryStarts, {s.requests + 1}}},
                  0, kStackArgNames, "");
  }

  bool layer_dtypes_fit(int64_t position) const {
    const ffi::DataType own = args[kNextNorm].element_type();
    for (int arg = 0; arg < kScales; arg++) {
      const ffi::DataType type = args[layer(position, arg)].element_type();
      const bool may_be_codes = std::find(kMatrices, std::end(kMatrices), arg) != std::end(kMatrices);
      if (arg == kSinks || arg == kSelectionBias ? type != ffi::F32
                                                 : type != own && !(arg == kRouter && type == ffi::F32) && !(may_be_codes && is_codes(type)))
        return false;
    }
    const ffi::DataType gate_up = args[layer(position, kGateUp)].element_type(), down = args[layer(position, kDown)].element_type();
    return gate_up == down || (is_codes(gate_up) && is_codes(down));
  }

  // The first mismatch of dtypes or shapes; "" if there is none.
  std::string fault(const StackShape& s, const std::vector<LayerTraits>& traits) const {
    const ffi::DataType stream = args[kX].element_type();
    for (int64_t position = 0; position < pattern; position++)
      if (!layer_dtypes_fit(position)) return "the weights of a stack have one dtype; its matrices may be codes, gate_up and down both";
    if (stream != ffi::F32 && stream != args[kNextNorm].element_type()) return "the stream is float32, or has the dtype of the weights";
    if (rets[kNormed].element_type() != args[kNextNorm].element_type()) return "the norm of the stream has the dtype of the weights";
    for (int arg : {kPositions, kTokenRows, kQueryStarts, kPageTable})
      if (args[arg].element_type() != ffi::S32) return "indices are int32";
    if (args[kCos].element_type() != ffi::F32 || args[kSin].element_type() != ffi::F32) return "angles are float32";
    const int64_t n = s.tokens;
    std::string misfits = step_misfit(s);
    for (int64_t position = 0; position < pattern && misfits.empty(); position++) misfits = layer_misfit(s, position, traits[position]);
    for (int64_t position = 0; position < pattern && misfits.empty(); position++) misfits = scales_misfit(position);
    if (!misfits.empty()) return misfits;
    if (s.angles != s.dim && 2 * s.angles > s.dim) return "angles are of a head, or of half of it at most";
    if (s.heads % s.groups != 0) return "kv heads divide heads";
    if ((s.first_layer + s.layers) * s.layer_pages > dim(kCache, 0)) return "the pool has the pages of all layers";
    if (records() && !is(block(), {dim(block(), 0), n})) return "the block of ids is [M*K, N]";
    if (records() && (s.first_column + s.sparse * s.repeats()) * s.top_k > dim(block(), 0))
      return "the block of ids has the rows of the stack's layers";
    if (records_weights() && !(is(block() + 1, {dim(block(), 0), n}) && args[block() + 1].element_type() == ffi::F32))
      return "the block of combine weights has the shape of that of the ids, and is float32";
    if (replays() && !(is(replay_ids(), {s.sparse * s.repeats(), n, s.top_k}) && is(replay_ids() + 1, {n}))) return "rows to replay are [M, N, K], and [N]";
    if (has_kv_scales() && !(is(kv_scales(), {dim(kv_scales(), 0), 2}) && args[kv_scales()].element_type() == ffi::F32 &&
                             dim(kv_scales(), 0) >= s.first_layer + s.layers && args[kCache].element_type() == ffi::U8))
      return "scales of keys and values are float32 [L, 2], of a pool of codes";
    if (replays() && (args[replay_ids()].element_type() != ffi::S32 || args[replay_ids() + 1].element_type() != ffi::PRED))
      return "rows to replay are int32, and their flags bool";
    return "";
  }
};

// Whether every id of a row to replay names an expert.
inline bool replay_ids_valid(const StackShape& s, ReplayRows replay) {
  for (int64_t layer = 0; layer < s.sparse * s.repeats(); layer++)
    for (int64_t n = 0; n < s.tokens; n++)
      for (int64_t k = 0; replay.has(n) && k < s.top_k; k++) {
        const int32_t id = replay.ids[(layer * s.tokens + n) * s.top_k + k];
        if (id < 0 || id >= s.experts) return false;
      }
  return true;
}

// Drop padding tokens and requests, which are last; false if positions of the others are outside the step or its page table, or pages that
// some layer reads or writes for them outside those of a layer.
inline bool trim_padding(StackShape& s, const std::vector<LayerTraits>& traits, const StackStep& in) {
  const int64_t num_valid = std::find(in.valid, in.valid + s.tokens, false) - in.valid;
  int64_t requests = 0;
  while (requests < s.requests && in.query_starts[requests] < num_valid) {
    if (in.query_starts[requests + 1] < in.query_starts[requests]) return false;
    requests++;
  }
  if (in.query_starts[0] != 0 || in.query_starts[requests] != num_valid) return false;
  for (int64_t n = 0; n < num_valid; n++) {
    if (in.positions[n] < 0 || in.positions[n] >= s.pages * s.page || in.token_rows[n] < 0 || in.token_rows[n] >= requests) return false;
    const int64_t page = in.page_table[in.token_rows[n] * s.pages + in.positions[n] / s.page];
    if (page < 0 || page >= s.layer_pages) return false;
  }
  s.tokens = num_valid, s.requests = requests;
  for (const LayerTraits& own : traits) {
    AttentionShape shape{s.tokens, s.heads, s.groups, s.dim, s.requests, s.pages, s.page, s.dim};
    shape.window = own.window, shape.chunk = own.chunk;
    if (!inside(shape, PagedStep{in.positions, in.query_starts, in.page_table, 0}, s.layer_pages)) return false;
  }
  return true;
}

ffi::Error run_layer_stack(ffi::ThreadPool pool, ffi::RemainingArgs inputs, ffi::RemainingRets results, int64_t pattern, int64_t first_layer,
                           int64_t first_column, int64_t layer_pages, int64_t top_k, float eps, float norm_offset, float residual_scale,
                           int64_t scoring, bool renormalize, float scale, float epsilon, float jitter_eps, int64_t num_groups,
                           int64_t topk_group, int64_t group_score_topk) {
  StackBuffers b(inputs, results, pattern);
  if (!b.complete()) return mismatch("the arrays and traits of each layer of the pattern");
  const int64_t first = b.layer(0, 0), dim = b.dim(kCache, 3), angles = b.dim(kCos, 1);
  std::vector<LayerTraits> traits;
  int64_t widest_shared = 0;
  for (int64_t position = 0; position < pattern; position++) {
    traits.push_back(b.traits(position, angles == dim ? dim / 2 : angles));
    widest_shared = std::max(widest_shared, traits.back().shared_width);
  }
  StackShape s{b.dim(kX, 0), b.dim(kX, 1), b.dim(first + kOut, 1) / dim, b.dim(kCache, 2) / 2, dim, b.dim(first + kQkv, 0) * pattern, pattern,
               b.sparse_dim(kRouter, 2), top_k, b.sparse_dim(kDown, 1), b.dim(kPageTable, 0), b.dim(kPageTable, 1), b.dim(kCache, 1),
               layer_pages, first_layer, first_column, angles, widest_shared, b.num_sparse(), eps, norm_offset, residual_scale,
               router_law(scoring, renormalize, scale, epsilon, jitter_eps, num_groups, topk_group, group_score_topk)};
  if (const std::string fault = b.fault(s, traits); !fault.empty()) return mismatch(fault);
  if (const char* fault = s.sparse ? router_fault(s.law, s.experts, s.top_k) : nullptr) return ffi::Error::InvalidArgument(fault);
  if (b.in<void>(kX) != b.out<void>(kStream) || b.in<void>(kCache) != b.out<void>(kWritten)) return ffi::Error::Internal("the KV pool was copied");
  if (!b.records_in_place()) return ffi::Error::Internal("a block of what is recorded was copied");
  const StackStep in{b.in<float>(kCos), b.in<float>(kSin), b.in<int32_t>(kPositions), b.in<int32_t>(kTokenRows),
                     b.in<int32_t>(kQueryStarts), b.in<int32_t>(kPageTable), b.in<bool>(kValid),
                     b.has_kv_scales() ? b.in<float>(b.kv_scales()) : nullptr};
  const ReplayRows replay = b.replay();
  if (!replay_ids_valid(s, replay)) return ffi::Error::InvalidArgument("a row to replay names an expert that does not exist");
  const int64_t padded = s.tokens;
  if (!trim_padding(s, traits, in)) return ffi::Error::InvalidArgument(kOutsideStep);
  const StackRecord record = b.record();
  Team team(pool);
  const int64_t count = s.tokens * s.hidden;
  return dispatch_rows(b.args[kX].element_type(), b.args[kNextNorm].element_type(), [&](auto row, auto type) {
    using X = decltype(row);
    using T = decltype(type);
    Arena measured(nullptr);
    StackScratch(measured, s, padded);
    LentScratch lent;
    Arena arena(lent->take<char>(measured.bytes()));
    const StackScratch scratch(arena, s, padded);
    std::vector<LayerArrays<T>> arrays;
    for (int64_t position = 0; position < pattern; position++) arrays.push_back(b.arrays<T>(position));
    T* normed = b.out<T>(kNormed);
    std::memset(static_cast<void*>(normed + count), 0, (padded - s.tokens) * s.hidden * sizeof(T));
    convert(b.out<X>(kStream), scratch.stream, count);
    return dispatch_pool(b.args[kCache].element_type(), [&](auto stored) {
      layer_stack(team, s, traits, arrays, b.in<T>(kNextNorm), in, scratch, normed, b.out<decltype(stored)>(kWritten), record, padded, replay);
      convert(scratch.stream, b.out<X>(kStream), count);
      return ffi::Error::Success();
    });
  });
}

}  // namespace rex
