// A stack of pre-norm layers, attention and experts, as one kernel: the same loops as the handlers of their parts, one after another,
// by one team. Padding tokens, which are last, are left out. Values between the weights stay float32 whatever the weights' dtype is:
// half precision would cost conversions and save no space. The stream is rounded when it leaves the stack, keys and values to the
// pool's dtype. Only inputs of a product with bfloat16 weights are rounded to that, except for routers.
#pragma once
#include <cmath>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "qk_norm_rope.h"
#include "router.h"

namespace rex {

constexpr int64_t kNormRows = 64;

struct StackShape {
  int64_t tokens, hidden, heads, groups, dim, layers, experts, top_k, width;
  int64_t requests, pages, page, layer_pages, first_layer, first_column;  // layer_pages: pages of a layer in the pool
  float eps;
  bool renormalize;
  int64_t projected() const { return (heads + 2 * groups) * dim; }
};

template <class T>
struct StackWeights {
  const T *input_norm, *post_norm, *next_norm, *q_norm, *k_norm, *qkv, *out, *router, *gate_up, *down;
};

struct StackStep {
  const float *cos, *sin;
  const int32_t *positions, *token_rows, *query_starts, *page_table;
  const bool* valid;
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

struct StackScratch {
  float *stream, *normed, *qkv, *queries, *mixed, *y, *logits, *weights;
  int32_t* ids;
  StackScratch(Arena& arena, const StackShape& s, int64_t tokens)
      : stream(arena.take<float>(tokens * s.hidden)),
        normed(arena.take<float>(tokens * s.hidden)),
        qkv(arena.take<float>(tokens * s.projected())),
        queries(arena.take<float>(tokens * s.heads * s.dim)),
        mixed(arena.take<float>(tokens * s.heads * s.dim)),
        y(arena.take<float>(tokens * s.hidden)),
        logits(arena.take<float>(tokens * s.experts)),
        weights(arena.take<float>(tokens * s.top_k)),
        ids(arena.take<int32_t>(tokens * s.top_k)) {}
};

// x += y unless y is null; normed = x / rms(x) * scale.
template <class T, class Out>
void add_and_norm_row(int64_t width, float eps, float* x, const float* y, const T* scale, Out* normed) {
  vf squares = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t left = width - d;
    vf part = load_upto(x + d, left);
    if (y != nullptr) store_upto(x + d, part += load_upto(y + d, left), left);
    squares += part * part;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / width + eps);
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t left = width - d;
    store_upto(normed + d, load_upto(scale + d, left) * (load_upto(x + d, left) * inverse), left);
  }
}

template <class T, class Out>
void add_and_norm(Team& team, const StackShape& s, float* x, const float* y, const T* scale, Out* normed) {
  each_block(team, s.tokens, kNormRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
      add_and_norm_row(s.hidden, s.eps, x + n * s.hidden, y == nullptr ? nullptr : y + n * s.hidden, scale, normed + n * s.hidden);
  });
}

// `x` [N, D] is the stream, updated in place; `normed` becomes the stream under `next_norm`; `cache` is the pool of all layers;
// `block` [M*K, stride] receives the ids of each layer, or is null; `replay` are rows of all layers, [R, stride, K].
template <class T, class P>
void layer_stack(Team& team, const StackShape& s, const StackWeights<T>& w, const StackStep& in, const StackScratch& a, T* x, T* normed, P* cache,
                int32_t* block, int64_t stride, ReplayRows replay) {
  const AttentionShape attention_shape{s.tokens, s.heads, s.groups, s.dim, s.requests, s.pages, s.page, s.dim};
  const RouterShape router_shape{s.tokens, s.experts, s.top_k, s.renormalize, stride};
  const QkNormRopeInputs<float, T> qkv_inputs{a.qkv, w.q_norm, w.k_norm, in.cos, in.sin, in.positions, in.token_rows, in.page_table, in.valid};
  convert(x, a.stream, s.tokens * s.hidden);
  add_and_norm(team, s, a.stream, nullptr, w.input_norm, a.normed);
  for (int64_t layer = 0; layer < s.layers; layer++) {
    const int64_t first_page = (s.first_layer + layer) * s.layer_pages;
    linear(team, s.tokens, s.hidden, s.projected(), a.normed, w.qkv + layer * s.hidden * s.projected(), a.qkv);
    qk_norm_rope(team, QkNormRopeShape{s.tokens, s.heads, s.groups, s.dim, s.pages, s.page, first_page, layer, s.eps}, qkv_inputs, a.queries, cache);
    attention(team, attention_shape, PagedStep{in.positions, in.query_starts, in.page_table, first_page}, a.queries, cache, a.mixed);
    linear(team, s.tokens, s.heads * s.dim, s.hidden, a.mixed, w.out + layer * s.heads * s.dim * s.hidden, a.y);
    add_and_norm(team, s, a.stream, a.y, w.post_norm + layer * s.hidden, a.normed);
    linear(team, s.tokens, s.hidden, s.experts, a.normed, w.router + layer * s.hidden * s.experts, a.logits, true);
    int32_t* column = block == nullptr ? nullptr : block + (s.first_column + layer) * s.top_k * stride;
    const ReplayRows mine{replay.ids == nullptr ? nullptr : replay.ids + layer * stride * s.top_k, replay.valid};
    route(team, router_shape, a.logits, mine, a.ids, a.weights, column);
    const ExpertShape expert_shape{s.tokens, s.top_k, s.hidden, s.width, s.experts, layer * s.experts};
    experts(team, expert_shape, a.normed, a.ids, a.weights, in.valid, w.gate_up, w.down, a.y);  // ids of `route` are in range
    if (layer + 1 < s.layers) add_and_norm(team, s, a.stream, a.y, w.input_norm + (layer + 1) * s.hidden, a.normed);
  }
  add_and_norm(team, s, a.stream, a.y, w.next_norm, normed);
  convert(a.stream, x, s.tokens * s.hidden);
}

}  // namespace rex
