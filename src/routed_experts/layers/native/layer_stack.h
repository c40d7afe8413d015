// A stack of pre-norm layers, attention and experts or a dense network, as one kernel: the same loops as the handlers of their parts, one after another,
// by one team. Padding tokens, which are last, are left out. Values between the weights stay float32 whatever the weights' dtype is:
// half precision would cost conversions and save no space. `Kernels.stream_dtype` (layers/kernels.py) says what is rounded.
// A stack repeats a pattern of one or more layers, each with traits and arrays of its own; arrays that a family has not are null.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "qk_prepare.h"
#include "router.h"
#include "rows.h"

namespace rex {

constexpr int64_t kNormRows = 64;

struct StackShape {
  int64_t tokens, hidden, heads, groups, dim, layers, pattern, experts, top_k, width;  // layers: of all repeats of the pattern
  int64_t requests, pages, page, layer_pages, first_layer, first_column;               // layer_pages: pages of a layer in the pool
  int64_t angles, widest_shared, sparse;  // numbers of a row of cosines; LayerTraits::shared_width at most; layers of the pattern with experts
  float eps, norm_offset, residual_scale;
  RouterLaw law;
  int64_t repeats() const { return layers / pattern; }
  int64_t projected(bool gated) const { return (heads * (gated ? 2 : 1) + 2 * groups) * dim; }
  int64_t mixed() const { return heads * dim; }
};

// A layer of the pattern.
struct LayerTraits {
  QkTraits qk;
  int64_t window, chunk;
  float scale;  // of the scores, 0: the usual one
  Activation activation;
  bool sparse, wide_router;  // experts, else a dense network; a router of float32
  int64_t sparse_before;     // layers of the pattern with experts that precede it
  int64_t shared_width;      // of the experts that every token runs, 0 for none; of the dense network
};

// Matrices of all repeats: numbers, or codes where numbers are null.
template <class T>
struct WeightStack {
  const T* numbers;
  Codes codes;
  template <class Body>
  void with(const Body& body) const {
    if (numbers != nullptr) body(numbers); else body(codes);
  }
};

// Arrays of a layer of the pattern, of all repeats.
template <class T>
struct LayerArrays {
  const T *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias, *out_bias, *router_bias, *gate_up_bias, *down_bias, *shared_gate;
  WeightStack<T> qkv, out, gate_up, down, shared_gate_up, shared_down;
  const void* router;
  const float *sinks, *selection_bias;
};

template <class T>
const T* of_repeat(const T* arrays, int64_t repeat, int64_t size) {
  return arrays == nullptr ? nullptr : arrays + repeat * size;
}

struct StackStep {
  const float *cos, *sin;
  const int32_t *positions, *token_rows, *query_starts, *page_table;
  const bool* valid;
  const float* kv_scales;  // [L, 2], of keys and values of the layers of a pool of codes, or null
  KvScales scales_of(int64_t layer) const { return kv_scales == nullptr ? KvScales{} : KvScales{kv_scales[2 * layer], kv_scales[2 * layer + 1]}; }
};

// Arrays one after another in the caller's memory, each aligned to a cache line; over nullptr it measures how much they take.
class Arena {
 public:
  explicit Arena(char* start) : start_(start) {}
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(start_) + bytes_);
    bytes_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    return taken;
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kLine = 64;
  char* start_;
  int64_t bytes_ = 0;
};

// What is recorded of all layers with experts, [M*K, stride]: ids and combine weights; null for none.
struct StackRecord {
  int32_t* ids = nullptr;
  float* weights = nullptr;
};

struct StackScratch {
  float *stream, *normed, *qkv, *queries, *mixed, *y, *logits, *weights, *both, *hidden, *shared;
  int32_t* ids;
  StackScratch(Arena& arena, const StackShape& s, int64_t tokens)
      : stream(arena.take<float>(tokens * s.hidden)),
        normed(arena.take<float>(tokens * s.hidden)),
        qkv(arena.take<float>(tokens * s.projected(true))),
        queries(arena.take<float>(tokens * s.heads * s.dim)),
        mixed(arena.take<float>(tokens * s.heads * s.dim)),
        y(arena.take<float>(tokens * s.hidden)),
        logits(arena.take<float>(tokens * s.experts)),
        weights(arena.take<float>(tokens * s.top_k)),
        both(arena.take<float>(tokens * 2 * s.widest_shared)),
        hidden(arena.take<float>(tokens * s.widest_shared)),
        shared(arena.take<float>(s.widest_shared ? tokens * s.hidden : 0)),
        ids(arena.take<int32_t>(tokens * s.top_k)) {}
};

// What is added to the stream: y [N, D], null for nothing, and a bias [D] or null.
template <class T>
struct Addend {
  const float* y;
  const T* bias;
};

// x += factor * (y + bias) unless y is null; normed = x / rms(x) * (scale + offset).
template <class T, class Out>
void add_and_norm_row(const StackShape& s, float* x, const float* y, const T* bias, const T* scale, Out* normed) {
  vf squares = {};
  for (int64_t d = 0; d < s.hidden; d += kLanes) {
    const int64_t left = s.hidden - d;
    vf part = load_upto(x + d, left);
    if (y != nullptr) {
      vf more = load_upto(y + d, left);
      if (bias != nullptr) more += load_upto(bias + d, left);
      store_upto(x + d, part += s.residual_scale * more, left);
    }
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / s.hidden + s.eps);
  for (int64_t d = 0; d < s.hidden; d += kLanes) {
    const int64_t left = s.hidden - d;
    store_upto(normed + d, (load_upto(scale + d, left) + s.norm_offset) * (load_upto(x + d, left) * inverse), left);
  }
}

template <class T, class Out>
void add_and_norm(Team& team, const StackShape& s, float* x, Addend<T> add, const T* scale, Out* normed) {
  each_block(team, s.tokens, kNormRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
      add_and_norm_row(s, x + n * s.hidden, add.y == nullptr ? nullptr : add.y + n * s.hidden, add.bias, scale, normed + n * s.hidden);
  });
}

// The product with a matrix of a repeat. Rows are rounded to bfloat16 where that is the dtype of the model.
template <class T>
void project(Team& team, int64_t rows, int64_t depth, int64_t cols, const float* x, const WeightStack<T>& w, int64_t repeat, float* y) {
  w.with([&](auto stack) { linear(team, rows, depth, cols, x, matrix_of(stack, repeat, depth, cols), y, !std::is_same_v<T, bf16>); });
}

// Attention of a layer, from the normalised stream to y.
template <class T, class P>
void stack_attention(Team& team, const StackShape& s, const LayerTraits& traits, const LayerArrays<T>& w, int64_t repeat, int64_t layer,
                     const StackStep& in, const StackScratch& a, P* cache) {
  const int64_t first_page = (s.first_layer + layer) * s.layer_pages, projected = s.projected(traits.qk.gated);
  const bool whole = traits.qk.norm == QkNorm::kWhole;
  const KvScales scales = in.scales_of(s.first_layer + layer);
  const AttentionShape shape{s.tokens, s.heads, s.groups, s.dim, s.requests, s.pages, s.page, s.dim,
                             0, traits.window, traits.chunk, traits.scale, of_repeat(w.sinks, repeat, s.heads), scales};
  const QkNormRopeShape prepared{s.tokens, s.heads, s.groups, s.dim, s.pages, s.page, first_page, 0, s.eps, s.angles, scales};
  const QkArrays<T> arrays{of_repeat(w.q_norm, repeat, (whole ? s.heads : 1) * s.dim), of_repeat(w.k_norm, repeat, (whole ? s.groups : 1) * s.dim),
                           of_repeat(w.qkv_bias, repeat, projected)};
  const QkNormRopeInputs<float, T> rows{a.qkv, nullptr, nullptr, in.cos, in.sin, in.positions, in.token_rows, in.page_table, in.valid};
  project(team, s.tokens, s.hidden, projected, a.normed, w.qkv, repeat, a.qkv);
  qk_prepare(team, prepared, traits.qk, arrays, rows, a.queries, cache);
  attention(team, shape, PagedStep{in.positions, in.query_starts, in.page_table, first_page}, a.queries, cache, a.mixed);
  if (traits.qk.gated) gate_heads(team, prepared, a.qkv, arrays.bias, a.mixed);
  project(team, s.tokens, s.mixed(), s.hidden, a.mixed, w.out, repeat, a.y);
}

// Router logits of a layer.
template <class T>
void stack_logits(Team& team, const StackShape& s, const LayerTraits& traits, const LayerArrays<T>& w, int64_t repeat, const StackScratch& a) {
  const int64_t first = repeat * s.hidden * s.experts;
  if (traits.wide_router) linear(team, s.tokens, s.hidden, s.experts, a.normed, static_cast<const float*>(w.router) + first, a.logits, true);
  else linear(team, s.tokens, s.hidden, s.experts, a.normed, static_cast<const T*>(w.router) + first, a.logits, true);
  const T* bias = of_repeat(w.router_bias, repeat, s.experts);
  if (bias == nullptr) return;
  each_block(team, s.tokens, kNormRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
      for (int64_t e = 0; e < s.experts; e++) a.logits[n * s.experts + e] += number(bias[e]);
  });
}

// y += the experts that every token runs, where there are some; y = the dense network of a layer without experts.
template <class T>
void add_shared(Team& team, const StackShape& s, const LayerTraits& traits, const LayerArrays<T>& w, int64_t repeat, const StackScratch& a) {
  const int64_t width = traits.shared_width;
  if (width == 0) return;
  const T* gates = of_repeat(w.shared_gate, repeat, s.hidden);
  project(team, s.tokens, s.hidden, 2 * width, a.normed, w.shared_gate_up, repeat, a.both);
  each_block(team, s.tokens, kNormRows, [&](int64_t begin, int64_t end) {
    const T* no_bias = nullptr;
    for (int64_t n = begin; n < end; n++)
      gate(Activation::kSilu, a.both + n * 2 * width, a.both + (n * 2 + 1) * width, no_bias, no_bias, width, a.hidden + n * width);
  });
  project(team, s.tokens, width, s.hidden, a.hidden, w.shared_down, repeat, traits.sparse ? a.shared : a.y);
  if (traits.sparse) add_gated_rows(team, s.tokens, s.hidden, a.normed, gates, a.shared, a.y);
}

// The router of a layer and the experts that it chooses, from the normalised stream to y.
template <class T>
void stack_experts(Team& team, const StackShape& s, const LayerTraits& traits, const LayerArrays<T>& w, int64_t repeat, const StackStep& in,
                   const StackScratch& a, StackRecord record, int64_t stride, ReplayRows replay) {
  const int64_t index = repeat * s.sparse + traits.sparse_before;  // among the layers with experts
  stack_logits(team, s, traits, w, repeat, a);
  RouterShape router_shape{s.tokens, s.experts, s.top_k, s.law, stride};
  router_shape.law.bias = of_repeat(w.selection_bias, repeat, s.experts);
  const int64_t column = (s.first_column + index) * s.top_k * stride;
  int32_t* ids = record.ids == nullptr ? nullptr : record.ids + column;
  float* weights = record.weights == nullptr ? nullptr : record.weights + column;
  const ReplayRows mine{replay.ids == nullptr ? nullptr : replay.ids + index * stride * s.top_k, replay.valid};
  route(team, router_shape, a.logits, mine, {a.ids, nullptr, a.weights, ids, weights});
  const ExpertShape expert_shape{s.tokens, s.top_k, s.hidden, s.width, s.experts, repeat * s.experts, false, traits.activation};
  const ExpertBiases<T> biases{w.gate_up_bias, w.down_bias};
  auto run = [&](auto gate_up, auto down) { experts(team, expert_shape, a.normed, a.ids, a.weights, in.valid, gate_up, down, a.y, biases); };
  if (w.gate_up.numbers != nullptr) run(w.gate_up.numbers, w.down.numbers); else run(w.gate_up.codes, w.down.codes);  // ids of `route` are in range
}

// `a.stream` [N, D] is updated in place; `normed` becomes the stream under `next_norm`; `cache` is the pool of all layers;
// `record` receives the rows of each layer with experts; `replay` are rows of all of those, [M, stride, K].
template <class T, class P>
void layer_stack(Team& team, const StackShape& s, const std::vector<LayerTraits>& traits, const std::vector<LayerArrays<T>>& arrays,
                 const T* next_norm, const StackStep& in, const StackScratch& a, T* normed, P* cache, StackRecord record, int64_t stride,
                 ReplayRows replay) {
  add_and_norm(team, s, a.stream, Addend<T>{nullptr, nullptr}, arrays[0].input_norm, a.normed);
  for (int64_t layer = 0; layer < s.layers; layer++) {
    const int64_t repeat = layer / s.pattern;
    const LayerTraits& own = traits[layer % s.pattern];
    const LayerArrays<T>& w = arrays[layer % s.pattern];
    stack_attention(team, s, own, w, repeat, layer, in, a, cache);
    add_and_norm(team, s, a.stream, Addend<T>{a.y, of_repeat(w.out_bias, repeat, s.hidden)}, w.post_norm + repeat * s.hidden, a.normed);
    if (own.sparse) stack_experts(team, s, own, w, repeat, in, a, record, stride, replay);
    add_shared(team, s, own, w, repeat, a);
    if (layer + 1 == s.layers) break;
    const T* next = arrays[(layer + 1) % s.pattern].input_norm + (layer + 1) / s.pattern * s.hidden;
    add_and_norm(team, s, a.stream, Addend<T>{a.y, nullptr}, next, a.normed);
  }
  add_and_norm(team, s, a.stream, Addend<T>{a.y, nullptr}, next_norm, normed);
}

}  // namespace rex
