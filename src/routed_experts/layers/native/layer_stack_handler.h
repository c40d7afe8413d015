// The handler of a stack of layers: names its arrays and checks their dtypes and shapes.
#pragma once
#include <algorithm>
#include <vector>

#include "handlers.h"
#include "layer_stack.h"

namespace rex {

// Arguments and results in order. A block of ids is last on both sides where ids are recorded; rows to replay come after it.
enum StackArg { kX, kInputNorm, kPostNorm, kNextNorm, kQNorm, kKNorm, kQkv, kOut, kRouter, kGateUp, kDown, kCos, kSin, kPositions,
              kTokenRows, kValid, kQueryStarts, kPageTable, kCache, kBlock, kReplayIds, kReplayValid };
enum StackResult { kStream, kNormed, kWritten, kBlockWritten };

struct StackBuffers {
  std::vector<ffi::AnyBuffer> args, rets;
  StackBuffers(ffi::RemainingArgs& arguments, ffi::RemainingRets& results) {
    for (size_t i = 0; i < arguments.size(); i++) args.push_back(*arguments.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); i++) rets.push_back(**results.get<ffi::AnyBuffer>(i));
  }
  bool records() const { return args.size() > kBlock; }
  bool replays() const { return args.size() > kReplayValid; }
  ReplayRows replay() { return replays() ? ReplayRows{in<int32_t>(kReplayIds), in<bool>(kReplayValid)} : ReplayRows{}; }
  int64_t dim(int arg, int axis) const { return args[arg].dimensions()[axis]; }
  bool is(int arg, std::initializer_list<int64_t> dims) const {
    const auto have = args[arg].dimensions();
    return have.size() == dims.size() && std::equal(have.begin(), have.end(), dims.begin());
  }
  template <class T>
  T* in(int arg) { return at<T>(args[arg]); }
  template <class T>
  T* out(int ret) { return at<T>(rets[ret]); }

  // The first mismatch of dtypes or shapes; null if there is none.
  const char* fault(const StackShape& s) const {
    for (int arg = kX; arg <= kDown; arg++)
      if (args[arg].element_type() != args[kX].element_type()) return "the stream and the weights of a stack have one dtype";
    for (int arg : {kPositions, kTokenRows, kQueryStarts, kPageTable})
      if (args[arg].element_type() != ffi::S32) return "indices are int32";
    if (args[kCos].element_type() != ffi::F32 || args[kSin].element_type() != ffi::F32) return "angles are float32";
    const int64_t n = s.tokens, d = s.hidden, r = s.layers, c = s.dim;
    const bool fits = is(kX, {n, d}) && is(kInputNorm, {r, d}) && is(kPostNorm, {r, d}) && is(kNextNorm, {d}) && is(kQNorm, {r, c}) &&
                      is(kKNorm, {r, c}) && is(kQkv, {r, d, s.projected()}) && is(kOut, {r, s.heads * c, d}) &&
                      is(kRouter, {r, d, s.experts}) && is(kGateUp, {r * s.experts, d, 2 * s.width}) &&
                      is(kDown, {r * s.experts, s.width, d}) && is(kCos, {n, c}) && is(kSin, {n, c}) && is(kPositions, {n}) &&
                      is(kTokenRows, {n}) && is(kValid, {n}) && is(kQueryStarts, {s.requests + 1});
    if (!fits) return "the arrays of a stack, as StackWeights and StepInputs say";
    if ((s.first_layer + r) * s.layer_pages > dim(kCache, 0)) return "the pool has the pages of all layers";
    if (records() && !is(kBlock, {dim(kBlock, 0), n})) return "the block of ids is [M*K, N]";
    if (records() && (s.first_column + r) * s.top_k > dim(kBlock, 0)) return "the block of ids has the rows of the stack's layers";
    if (replays() && !(is(kReplayIds, {r, n, s.top_k}) && is(kReplayValid, {n}))) return "rows to replay are [R, N, K], and [N]";
    if (replays() && (args[kReplayIds].element_type() != ffi::S32 || args[kReplayValid].element_type() != ffi::PRED))
      return "rows to replay are int32, and their flags bool";
    return nullptr;
  }
};

// Whether every id of a row to replay names an expert.
inline bool replay_ids_valid(const StackShape& s, ReplayRows replay) {
  for (int64_t layer = 0; layer < s.layers; layer++)
    for (int64_t n = 0; n < s.tokens; n++)
      for (int64_t k = 0; replay.has(n) && k < s.top_k; k++) {
        const int32_t id = replay.ids[(layer * s.tokens + n) * s.top_k + k];
        if (id < 0 || id >= s.experts) return false;
      }
  return true;
}

// Drop padding tokens and requests, which are last; false if positions of the others are outside the step or its page table.
inline bool trim_padding(StackShape& s, const StackStep& in) {
  const int64_t num_valid = std::find(in.valid, in.valid + s.tokens, false) - in.valid;
  int64_t requests = 0;
  while (requests < s.requests && in.query_starts[requests] < num_valid) {
    if (in.query_starts[requests + 1] < in.query_starts[requests]) return false;
    requests++;
  }
  if (in.query_starts[0] != 0 || in.query_starts[requests] != num_valid) return false;
  for (int64_t n = 0; n < num_valid; n++)
    if (in.positions[n] < 0 || in.positions[n] >= s.pages * s.page || in.token_rows[n] < 0 || in.token_rows[n] >= requests) return false;
  s.tokens = num_valid, s.requests = requests;
  return true;
}

ffi::Error run_layer_stack(ffi::ThreadPool pool, ffi::RemainingArgs inputs, ffi::RemainingRets results, int64_t first_layer, int64_t first_column,
                         int64_t layer_pages, int64_t top_k, float eps, bool renormalize) {
  StackBuffers b(inputs, results);
  const int64_t dim = b.dim(kQNorm, 1), experts = b.dim(kRouter, 2);
  StackShape s{b.dim(kX, 0), b.dim(kX, 1), b.dim(kOut, 1) / dim, b.dim(kCache, 2) / 2, dim, b.dim(kQkv, 0), experts, top_k, b.dim(kDown, 1),
             b.dim(kPageTable, 0), b.dim(kPageTable, 1), b.dim(kCache, 1), layer_pages, first_layer, first_column, eps, renormalize};
  if (const char* fault = b.fault(s)) return mismatch(fault);
  if (b.dim(kCache, 3) != dim) return ffi::Error::InvalidArgument("the pool's rows must be as wide as a head");
  if (b.in<void>(kX) != b.out<void>(kStream) || b.in<void>(kCache) != b.out<void>(kWritten)) return ffi::Error::Internal("the KV pool was copied");
  if (b.records() && b.in<void>(kBlock) != b.out<void>(kBlockWritten)) return ffi::Error::Internal("the block of ids was copied");
  const StackStep in{b.in<float>(kCos), b.in<float>(kSin), b.in<int32_t>(kPositions), b.in<int32_t>(kTokenRows),
                   b.in<int32_t>(kQueryStarts), b.in<int32_t>(kPageTable), b.in<bool>(kValid)};
  const ReplayRows replay = b.replay();
  if (!replay_ids_valid(s, replay)) return ffi::Error::InvalidArgument("a row to replay names an expert that does not exist");
  const int64_t padded = s.tokens;
  if (!trim_padding(s, in)) return ffi::Error::InvalidArgument("query_starts or positions are outside the step or its page table");
  int32_t* block = b.records() ? b.out<int32_t>(kBlockWritten) : nullptr;
  Team team(pool);
  return dispatch_dtype(b.args[kX].element_type(), [&](auto type) {
    using T = decltype(type);
    Arena measured(nullptr);
    StackScratch(measured, s, padded);
    LentScratch lent;
    Arena arena(lent->take<char>(measured.bytes()));
    const StackScratch scratch(arena, s, padded);
    const StackWeights<T> weights{b.in<T>(kInputNorm), b.in<T>(kPostNorm), b.in<T>(kNextNorm), b.in<T>(kQNorm), b.in<T>(kKNorm),
                                b.in<T>(kQkv), b.in<T>(kOut), b.in<T>(kRouter), b.in<T>(kGateUp), b.in<T>(kDown)};
    T* normed = b.out<T>(kNormed);
    std::memset(static_cast<void*>(normed + s.tokens * s.hidden), 0, (padded - s.tokens) * s.hidden * sizeof(T));
    return dispatch_dtype(b.args[kCache].element_type(), [&](auto stored) {
      layer_stack(team, s, weights, in, scratch, b.out<T>(kStream), normed, b.out<decltype(stored)>(kWritten), block, padded, replay);
      return ffi::Error::Success();
    });
  });
}

}  // namespace rex
