// The gated delta rule of layers/delta_rule.py over the tokens of a step, token by token; states of requests are updated in place. A decay is
// one number for a head, or one for each of its K key channels, that is for each row of its memory.
//
// Columns of a memory S [K, V] do not meet: of many tokens, a few columns at a time stay in the first cache from the first token to the
// last, which costs no more than products over chunks, and the bits are the same however a sequence is cut. A number that is not finite
// in a key spoils the value heads of its key head, in a value its own column, in a decay (of whatever channel) or rate its own head, from its
// token on; one in a query alone spoils the tokens that its convolution reaches (plain array code spoils all later tokens).
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int64_t kConvTokens = 16;    // of a piece of work
constexpr int kDeltaVectors = 8;       // columns of a memory side by side at most, of one token
constexpr int kDeltaBlockVectors = 2;  // and of many: with the rows of a head they fill half of the first cache
constexpr float kUnitEpsilon = 1e-6f;

struct DeltaShape {
  int64_t tokens, requests, slots, key_heads, value_heads, key_dim, value_dim, width, layer;
  bool by_channel;  // a decay for each key channel of a head
  int64_t decays() const { return by_channel ? value_heads * key_dim : value_heads; }
  int64_t keys() const { return key_heads * key_dim; }
  int64_t channels() const { return 2 * keys() + value_heads * value_dim; }
};

// `fresh`: requests that start anew. States are [L, S, ...], those of request b at slots[b].
template <class X>
struct DeltaStep {
  const X* mixed;      // [N, Q]
  const float* kernel;  // [Q, W]
  const float *decay, *beta;  // [N, H] or [N, H * K], and [N, H]
  const int32_t *query_starts, *request_slots;
  const bool* fresh;
  X* conv;
  float* recurrent;
  int64_t count(int64_t b) const { return query_starts[b + 1] - query_starts[b]; }
};

template <class X>
X* conv_state(const DeltaShape& s, const DeltaStep<X>& in, int64_t b) {
  return in.conv + (s.layer * s.slots + in.request_slots[b]) * (s.width - 1) * s.channels();
}

// Input `at` of a request's tokens in the step; those before it are in the state, and null where there are none.
template <class X>
const X* conv_input(const DeltaShape& s, const DeltaStep<X>& in, int64_t b, int64_t at) {
  if (at >= 0) return in.mixed + (in.query_starts[b] + at) * s.channels();
  return in.fresh[b] ? nullptr : conv_state(s, in, b) + (s.width - 1 + at) * s.channels();
}

// x / |x| times `factor`.
inline void make_unit(float* x, int64_t count, float factor) {
  vf squares = {};
  for (int64_t c = 0; c < count; c += kLanes) {
    const vf part = load_upto(x + c, count - c);
    squares += part * part;
  }
  scale_to(x, factor / std::sqrt(sum(squares) + kUnitEpsilon), x, count);
}

// Queries (scaled), keys and values of a token: `taps` [W, Q] is the kernel, `out` [Q].
template <class X>
void convolve(const DeltaShape& s, const DeltaStep<X>& in, int64_t b, int64_t at, const float* taps, float* out) {
  const int64_t channels = s.channels();
  for (int64_t c = 0; c < channels; c += kLanes) {
    vf sums = {};
    for (int64_t w = 0; w < s.width; w++)
      if (const X* row = conv_input(s, in, b, at - (s.width - 1) + w))
        sums += load_upto(row + c, channels - c) * load_upto(taps + w * channels + c, channels - c);
    store_upto(out + c, sums / (1.0f + exp(-sums)), channels - c);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.key_dim));
  for (int64_t j = 0; j < s.key_heads; j++) {
    make_unit(out + j * s.key_dim, s.key_dim, scale);
    make_unit(out + s.keys() + j * s.key_dim, s.key_dim, 1.0f);
  }
}

// What is left of row k of a memory: of each as much, or of each its own part.
inline float left_of(float all, int64_t) { return all; }
inline float left_of(const float* rows, int64_t k) { return rows[k]; }

// Vectors vectors of the columns of a head's memory, rows `ld` apart, of which the last has `last` numbers that count. What a token adds is
// added when the next one reads, so that each token passes over the memory once; `finish` adds what the last one left.
template <int Vectors>
struct DeltaColumns {
  int64_t key_dim, ld, last;
  float* memory;
  const float* pending_key = nullptr;
  vf pending[Vectors];

  // S is decayed, corrected by what it gives wrongly for the key, and read.
  template <class Left>
  void step(Left left, float beta, float overlap, const float* query, const float* key, const float* values, float* read) {
    vf wrong[Vectors] = {}, asked[Vectors] = {};
    if (pending_key == nullptr) pass<false>(left, query, key, wrong, asked); else pass<true>(left, query, key, wrong, asked);
    for (int v = 0; v < Vectors; v++) {
      const int64_t count = v + 1 < Vectors ? kLanes : last;
      pending[v] = (load_upto(values + v * kLanes, count) - wrong[v]) * beta;
      store_upto(read + v * kLanes, asked[v] + overlap * pending[v], count);
    }
    pending_key = key;
  }
  template <bool Pending, class Left>
  void pass(Left left, const float* query, const float* key, vf (&wrong)[Vectors], vf (&asked)[Vectors]) {
    for (int64_t k = 0; k < key_dim; k++) {
      const float of_key = key[k], of_query = query[k], of_line = left_of(left, k);  // once: a store may change what a pointer names
      for (int v = 0; v < Vectors; v++) {
        vf line = load(memory + k * ld + v * kLanes);
        if constexpr (Pending) line += pending_key[k] * pending[v];
        line = of_line * line;
        store(memory + k * ld + v * kLanes, line);
        wrong[v] += of_key * line, asked[v] += of_query * line;
      }
    }
  }
  void finish() {
    for (int64_t k = 0; pending_key != nullptr && k < key_dim; k++)
      for (int v = 0; v < Vectors; v++) {
        float* line = memory + k * ld + v * kLanes;
        store(line, load(line) + pending_key[k] * pending[v]);
      }
  }
};

// What the convolution and the decays give: queries (scaled), keys and values [N, Q], and what is left of each row [N, H, K] where each has
// a decay of its own.
struct DeltaRows {
  float *convolved, *left;
};

// All tokens of a request in one head, over columns begin..end-1; `memory` holds them at its beginning, rows `ld` apart.
template <int Vectors, bool ByChannel, class X>
void delta_tokens(const DeltaShape& s, const DeltaStep<X>& in, int64_t b, int64_t head, const DeltaRows& rows, int64_t begin, int64_t end,
                  float* memory, int64_t ld, float* read) {
  const int64_t j = head / (s.value_heads / s.key_heads);
  DeltaColumns<Vectors> columns{s.key_dim, ld, end - begin - (Vectors - 1) * kLanes, memory};
  for (int64_t n = in.query_starts[b]; n < in.query_starts[b + 1]; n++) {
    const float *row = rows.convolved + n * s.channels(), *query = row + j * s.key_dim, *key = row + s.keys() + j * s.key_dim;
    const float* values = row + 2 * s.keys() + head * s.value_dim + begin;
    vf products = {};
    for (int64_t k = 0; k < s.key_dim; k += kLanes) products += load_upto(query + k, s.key_dim - k) * load_upto(key + k, s.key_dim - k);
    const float beta = in.beta[n * s.value_heads + head];
    float* out = read + (n * s.value_heads + head) * s.value_dim + begin;
    if constexpr (ByChannel)
      columns.step(rows.left + (n * s.value_heads + head) * s.key_dim, beta, sum(products), query, key, values, out);
    else
      columns.step(exp(vf{} + in.decay[n * s.value_heads + head])[0], beta, sum(products), query, key, values, out);
  }
  columns.finish();
}

template <int Most, bool ByChannel, class... Rest>
void by_vectors(int64_t vectors, const Rest&... rest) {
  if constexpr (Most > 1) {
    if (vectors < Most) return by_vectors<Most - 1, ByChannel>(vectors, rest...);
  }
  delta_tokens<Most, ByChannel>(rest...);
}

// Columns of one head for a request's tokens: in place where whole vectors meet one token, else in a copy of their own.
template <bool ByChannel, class X>
void delta_item(const DeltaShape& s, const DeltaStep<X>& in, int64_t b, int64_t head, int64_t begin, int64_t end, const DeltaRows& rows,
                float* read) {
  thread_local Scratch scratch;
  float* state = in.recurrent + (((s.layer * s.slots + in.request_slots[b]) * s.value_heads + head) * s.key_dim) * s.value_dim + begin;
  const int64_t vectors = (end - begin + kLanes - 1) / kLanes, ld = vectors * kLanes;
  if (in.fresh[b])
    for (int64_t k = 0; k < s.key_dim; k++) std::fill_n(state + k * s.value_dim, end - begin, 0.0f);
  if (in.count(b) == 1 && end - begin == ld)
    return by_vectors<kDeltaVectors, ByChannel>(vectors, s, in, b, head, rows, begin, end, state, s.value_dim, read);
  float* memory = scratch.floats(s.key_dim * ld);
  for (int64_t k = 0; k < s.key_dim; k++)
    for (int64_t c = 0; c < ld; c += kLanes) store(memory + k * ld + c, load_upto(state + k * s.value_dim + c, end - begin - c));
  by_vectors<kDeltaVectors, ByChannel>(vectors, s, in, b, head, rows, begin, end, memory, ld, read);
  for (int64_t k = 0; k < s.key_dim; k++) convert(memory + k * ld, state + k * s.value_dim, end - begin);
}

// The inputs that the next step's convolution begins with.
template <class X>
void shift_conv(const DeltaShape& s, const DeltaStep<X>& in, int64_t b) {
  X* state = conv_state(s, in, b);
  for (int64_t i = 0; i + 1 < s.width; i++, state += s.channels()) {
    const X* from = conv_input(s, in, b, in.count(b) - (s.width - 1) + i);
    if (from == nullptr) std::memset(static_cast<void*>(state), 0, s.channels() * sizeof(X));
    else std::memcpy(static_cast<void*>(state), from, s.channels() * sizeof(X));
  }
}

// `read` [N, H, V]: rows of no request are 0.
template <class X>
void delta_rule(Team& team, const DeltaShape& s, const DeltaStep<X>& in, float* read) {
  struct Item {
    int64_t request, begin, end;  // tokens of the request, or columns of each of its heads
  };
  LentScratch lent;
  const int64_t channels = s.channels(), total = s.requests ? in.query_starts[s.requests] : 0, row = s.value_heads * s.value_dim;
  const int64_t decays = s.by_channel ? s.decays() : 0;
  float* taps = lent->floats(s.width * channels + total * (channels + decays));
  const DeltaRows rows{taps + s.width * channels, taps + (s.width + total) * channels};
  for (int64_t c = 0; c < channels; c++)
    for (int64_t w = 0; w < s.width; w++) taps[w * channels + c] = in.kernel[c * s.width + w];
  std::vector<Item> parts, columns;
  std::vector<int64_t> fed;
  for (int64_t b = 0; b < s.requests; b++) {
    if (in.count(b) == 0) continue;
    fed.push_back(b);
    for (int64_t t = 0; t < in.count(b); t += kConvTokens) parts.push_back({b, t, std::min(t + kConvTokens, in.count(b))});
    const int64_t step = kLanes * (in.count(b) == 1 ? kDeltaVectors : kDeltaBlockVectors);
    for (int64_t c = 0; c < s.value_dim; c += step) columns.push_back({b, c, std::min(c + step, s.value_dim)});
  }
  std::stable_sort(columns.begin(), columns.end(), [&](const Item& a, const Item& b) { return in.count(a.request) > in.count(b.request); });
  team.each(parts.size(), [&](int64_t i) {
    const Item& part = parts[i];
    for (int64_t t = part.begin; t < part.end; t++) {
      const int64_t n = in.query_starts[part.request] + t;
      convolve(s, in, part.request, t, taps, rows.convolved + n * channels);
      for (int64_t x = 0; x < decays; x += kLanes)
        store_upto(rows.left + n * decays + x, exp(load_upto(in.decay + n * decays + x, decays - x)), decays - x);
    }
  });
  team.each(columns.size() * s.value_heads, [&](int64_t i) {
    const Item& item = columns[i / s.value_heads];
    const auto run = s.by_channel ? delta_item<true, X> : delta_item<false, X>;
    run(s, in, item.request, i % s.value_heads, item.begin, item.end, rows, read);
  });
  team.each(fed.size(), [&](int64_t i) { shift_conv(s, in, fed[i]); });
  std::memset(static_cast<void*>(read + total * row), 0, (s.tokens - total) * row * sizeof(float));
}

}  // namespace rex
