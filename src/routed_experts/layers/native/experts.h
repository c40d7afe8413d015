// y[n] = sum over k of weights[n, k] * down(activated(gate(x[n]), up(x[n]))) of expert ids[n, k], summed in executed order; each product
// may have a bias. With `partial`, some of a row's slots may be empty: their id is -1.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"

namespace rex {

constexpr int64_t kExpertRows = 192;  // rows of a piece of work: they and their hidden values stay in cache beside the weights
constexpr int64_t kCombineRows = 64;
constexpr int64_t kPartColumns = 128;  // a part of an expert reads runs of at least so many weights

enum class Activation : int64_t { kSilu, kClampedSwiglu, kTanhGelu };  // as `activations` of ops.py has them

struct ExpertShape {
  int64_t tokens, top_k, hidden, width, experts, first;
  bool partial = false;
  Activation activation = Activation::kSilu;
  bool is_empty(int32_t id) const { return partial && id == -1; }
  int64_t out_step() const { return hidden + kPad; }
};

struct Piece {
  int64_t expert, begin, end;  // of the slots sorted by expert
};

// Sort the slots of valid rows by expert and cut them into pieces, the longest first; false if an id is out of range.
inline bool plan(const ExpertShape& s, const int32_t* ids, const bool* valid, std::vector<int32_t>& order, std::vector<Piece>& pieces) {
  std::vector<int64_t> starts(s.experts + 1);
  for (int64_t n = 0; n < s.tokens; n++) {
    if (!valid[n]) continue;
    for (int64_t k = 0; k < s.top_k; k++) {
      const int32_t id = ids[n * s.top_k + k];
      if (s.is_empty(id)) continue;
      if (id < 0 || id >= s.experts) return false;
      starts[id + 1]++;
    }
  }
  for (int64_t e = 0; e < s.experts; e++) {
    starts[e + 1] += starts[e];
    const int64_t count = starts[e + 1] - starts[e], parts = (count + kExpertRows - 1) / kExpertRows;
    for (int64_t part = 0; part < parts; part++)
      pieces.push_back({e, starts[e] + count * part / parts, starts[e] + count * (part + 1) / parts});
  }
  order.resize(starts[s.experts]);
  for (int64_t n = 0; n < s.tokens; n++)
    for (int64_t k = 0; valid[n] && k < s.top_k; k++)
      if (const int32_t id = ids[n * s.top_k + k]; !s.is_empty(id)) order[starts[id]++] = n * s.top_k + k;
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.end - a.begin > b.end - b.begin; });
  return true;
}

// Biases of all experts of a run, or null.
template <class T>
struct ExpertBiases {
  const T *gate_up = nullptr, *down = nullptr;  // [RE, 2F], [RE, D]
};

inline vf silu(vf gate, vf up) { return gate / (1.0f + exp(-gate)) * up; }
inline vf tanh_gelu(vf gate, vf up) {  // (1 + tanh(u)) / 2 is the sigmoid of 2u; Hendrycks and Gimpel 2016
  const vf twice = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + exp(-twice)) * up;
}
inline vf clamped_swiglu(vf gate, vf up) {  // GPT-OSS; NaN stays NaN
  const vf limit = vf{} + 7.0f;
  const vf g = gate > limit ? limit : gate, below = up < -limit ? -limit : up, u = below > limit ? limit : below;
  return g / (1.0f + exp(g * -1.702f)) * (u + 1.0f);
}

// gate [F] and up [F] -> hidden [F]; biases, where there are, are added first.
template <class T, class Out, class Law>
inline void gate_by(const Law& law, const float* gate, const float* up, const T* gate_bias, const T* up_bias, int64_t width, Out* hidden) {
  for (int64_t f = 0; f < width; f += kLanes) {
    const int64_t left = width - f;
    vf g = load_upto(gate + f, left), u = load_upto(up + f, left);
    if (gate_bias != nullptr) g += load_upto(gate_bias + f, left), u += load_upto(up_bias + f, left);
    store_upto(hidden + f, law(g, u), left);
  }
}

template <class T, class Out>
inline void gate(Activation activation, const float* gate, const float* up, const T* gate_bias, const T* up_bias, int64_t width, Out* hidden) {
  if (activation == Activation::kClampedSwiglu) return gate_by([](vf g, vf u) { return clamped_swiglu(g, u); }, gate, up, gate_bias, up_bias, width, hidden);
  if (activation == Activation::kTanhGelu) return gate_by([](vf g, vf u) { return tanh_gelu(g, u); }, gate, up, gate_bias, up_bias, width, hidden);
  gate_by([](vf g, vf u) { return silu(g, u); }, gate, up, gate_bias, up_bias, width, hidden);
}

// R: what rows and hidden values are rounded to before they are multiplied. Stack: of matrices, a pointer or Codes.
template <class R, class X, class Stack, class T>
struct ExpertRun {
  const ExpertShape& s;
  const X* x;
  Stack gate_up, down;
  ExpertBiases<T> biases;
  const int32_t* order;
  float* outputs;  // [slots, out_step]
  R* hidden;       // [slots, hidden_step]; where experts are run in parts

  static bool in_blocks(const Stack& stack) {
    if constexpr (std::is_same_v<R, bf16>) return fits_tiles(stack);
    return false;
  }
  int64_t hidden_step() const { return RowMatrix<R>::step_of(s.width, in_blocks(down)); }
  RowMatrix<R> hidden_rows(const Piece& piece, R* first) const { return {first, piece.end - piece.begin, s.width, in_blocks(down)}; }

  RowMatrix<const R> gathered(const Piece& piece) const {
    thread_local Scratch scratch;
    const int64_t count = piece.end - piece.begin;
    const RowMatrix<R> rows{scratch.take<R>(count * RowMatrix<R>::step_of(s.hidden, in_blocks(gate_up))), count, s.hidden, in_blocks(gate_up)};
    for (int64_t i = 0; i < count; i++) rows.set(i, x + order[piece.begin + i] / s.top_k * s.hidden);
    return rows;
  }

  // Hidden values of columns begin..end-1 from rows of both products of these columns.
  void activate(const Piece& piece, const float* gates, const float* ups, int64_t step, int64_t begin, int64_t end, const RowMatrix<R>& to) const {
    const T* bias = biases.gate_up == nullptr ? nullptr : biases.gate_up + (s.first + piece.expert) * 2 * s.width;
    for (int64_t i = 0; i < to.count; i++, gates += step, ups += step) {
      to.each_run(i, begin, end, [&](int64_t c, int64_t last, R* values) {
        const T* own = bias == nullptr ? nullptr : bias + c;
        gate(s.activation, gates + c - begin, ups + c - begin, own, own == nullptr ? nullptr : own + s.width, last - c, values);
      });
      if (end == s.width) to.fill_up(i);
    }
  }

  // A whole expert: its hidden values stay in cache.
  void run_whole(const Piece& piece) const {
    thread_local Scratch both_scratch, hidden_scratch;
    const int64_t count = piece.end - piece.begin, wide = 2 * s.width, step = wide + kPad;
    const RowMatrix<R> inner = hidden_rows(piece, hidden_scratch.take<R>(count * hidden_step()));
    float* both = both_scratch.floats(count * step);
    multiply(gathered(piece), matrix_of(gate_up, s.first + piece.expert, s.hidden, wide), wide, wide, both, step);
    activate(piece, both, both + s.width, step, 0, s.width, inner);
    down_part(piece, inner, 0, s.hidden);
  }

  // Columns begin..end of the hidden values.
  void gate_up_part(const Piece& piece, int64_t begin, int64_t end) const {
    thread_local Scratch scratch;
    const int64_t count = piece.end - piece.begin, wide = 2 * s.width, part = end - begin, step = 2 * part + kPad;
    float* both = scratch.floats(count * step);
    const RowMatrix<const R> from = gathered(piece);
    const Stack weights = matrix_of(gate_up, s.first + piece.expert, s.hidden, wide) + begin;
    multiply(from, weights, wide, part, both, step);
    multiply(from, weights + s.width, wide, part, both + part, step);
    activate(piece, both, both + part, step, begin, end, hidden_rows(piece, hidden + piece.begin * hidden_step()));
  }

  // Columns begin..end of the expert's output.
  void down_part(const Piece& piece, const RowMatrix<const R>& inner, int64_t begin, int64_t end) const {
    float* out = outputs + piece.begin * s.out_step() + begin;
    const Stack weights = matrix_of(down, s.first + piece.expert, s.width, s.hidden) + begin;
    multiply(inner, weights, s.hidden, end - begin, out, s.out_step());
  }
};

// Into how many parts each expert is cut: one, unless there are so few experts that cores would idle for more than a fifth of the
// time, and at most `few_rows` rows each on average. A part reads its columns in stretches, a whole expert reads its weights contiguously, which is
// a third faster. Sums are never cut, so a row's result is bitwise the same.
inline int64_t expert_parts(const ExpertShape& s, int64_t slots, int64_t pieces, int64_t threads, int64_t few_rows) {
  const int64_t rounds = (pieces + threads - 1) / threads;
  if (slots > pieces * few_rows || 4 * rounds * threads <= 5 * pieces) return 1;
  const int64_t most = std::max<int64_t>(1, std::min(s.width, s.hidden) / kPartColumns);
  return std::clamp<int64_t>((16 * threads + pieces - 1) / pieces, 1, most);
}

// Column `part` of `parts` begins here: whole tiles, and whole vectors.
inline int64_t part_start(int64_t cols, int64_t part, int64_t parts) {
  return part == parts ? cols : cols * part / parts / kTileSide * kTileSide;
}

template <class T, class Y>
void combine(const ExpertShape& s, int64_t n, const int32_t* slot_row, const int32_t* ids, const float* weights, bool valid, const float* outputs,
             const T* bias, Y* y) {
  for (int64_t d = 0; d < s.hidden; d += kLanes) {
    const int64_t left = s.hidden - d;
    vf total = {};
    for (int64_t k = n * s.top_k; valid && k < (n + 1) * s.top_k; k++) {
      if (slot_row[k] < 0) continue;
      vf row = load_upto(outputs + slot_row[k] * s.out_step() + d, left);
      if (bias != nullptr) row += load_upto(bias + (s.first + ids[k]) * s.hidden + d, left);
      total += weights[k] * row;
    }
    store_upto(y + n * s.hidden + d, total, left);
  }
}

template <class Run>
void run_pieces(Team& team, Run run, const std::vector<Piece>& pieces, int64_t slots) {
  thread_local Scratch scratch;
  const int64_t parts = expert_parts(run.s, slots, pieces.size(), team.size(), stream_rows(run.gate_up));
  if (parts == 1) return team.each(pieces.size(), [&](int64_t i) { run.run_whole(pieces[i]); });
  using R = std::remove_pointer_t<decltype(run.hidden)>;
  run.hidden = scratch.take<R>(slots * run.hidden_step());
  const int64_t items = pieces.size() * parts;
  team.each(items, [&](int64_t i) {
    run.gate_up_part(pieces[i / parts], part_start(run.s.width, i % parts, parts), part_start(run.s.width, i % parts + 1, parts));
  });
  team.each(items, [&](int64_t i) {
    const Piece& piece = pieces[i / parts];
    const int64_t begin = part_start(run.s.hidden, i % parts, parts), end = part_start(run.s.hidden, i % parts + 1, parts);
    run.down_part(piece, run.hidden_rows(piece, run.hidden + piece.begin * run.hidden_step()), begin, end);
  });
}

// T: the dtype of the model, which weights have that are not codes. In bfloat16 rows and hidden values are rounded to that where that is
// faster and they fit.
template <class X, class Stack, class Y, class T>
bool experts(Team& team, const ExpertShape& s, const X* x, const int32_t* ids, const float* weights, const bool* valid,
             Stack gate_up, Stack down, Y* y, ExpertBiases<T> biases) {
  std::vector<int32_t> order;
  std::vector<Piece> pieces;
  if (!plan(s, ids, valid, order, pieces)) return false;
  std::vector<int32_t> slot_row(s.tokens * s.top_k, -1);
  for (size_t i = 0; i < order.size(); i++) slot_row[order[i]] = i;
  thread_local Scratch scratch;
  float* outputs = scratch.floats(order.size() * s.out_step());
  auto run = [&](auto kind) {
    run_pieces(team, ExpertRun<decltype(kind), X, Stack, T>{s, x, gate_up, down, biases, order.data(), outputs, nullptr}, pieces, order.size());
  };
  bool rounded = false;
  if constexpr (std::is_same_v<T, bf16>) {
    rounded = fits_bf16(gate_up, s.hidden, s.width) && fits_bf16(down, s.width, s.hidden);
    if (rounded) run(bf16{});
  }
  if (!rounded) run(float{});
  each_block(team, s.tokens, kCombineRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) combine(s, n, slot_row.data(), ids, weights, valid[n], outputs, biases.down, y);
  });
  return true;
}

}  // namespace rex
