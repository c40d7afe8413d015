// y[n] = sum over k of weights[n, k] * down(silu(gate(x[n])) * up(x[n])) of expert ids[n, k], summed in executed order.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "product.h"

namespace rex {

constexpr int64_t kExpertRows = 128;  // rows of a piece of work: they and their hidden values stay in cache beside the weights

struct ExpertShape {
  int64_t tokens, top_k, hidden, width, experts, first;
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
      if (id < 0 || id >= s.experts) return false;
      starts[id + 1]++;
    }
  }
  for (int64_t e = 0; e < s.experts; e++) {
    starts[e + 1] += starts[e];
    for (int64_t begin = starts[e]; begin < starts[e + 1]; begin += kExpertRows)
      pieces.push_back({e, begin, std::min(begin + kExpertRows, starts[e + 1])});
  }
  order.resize(starts[s.experts]);
  for (int64_t n = 0; n < s.tokens; n++)
    for (int64_t k = 0; valid[n] && k < s.top_k; k++) order[starts[ids[n * s.top_k + k]]++] = n * s.top_k + k;
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.end - a.begin > b.end - b.begin; });
  return true;
}

inline void gate(const float* both, int64_t width, float* hidden) {  // [2F] -> [F]
  int64_t f = 0;
  auto gated = [](vf g, vf up) { return g / (1.0f + exp(-g)) * up; };
  for (; f + kLanes <= width; f += kLanes) store(hidden + f, gated(load(both + f), load(both + width + f)));
  if (const int rest = width - f) store(hidden + f, gated(load(both + f, rest), load(both + width + f, rest)), rest);
}

template <class T>
void run_piece(const ExpertShape& s, const Piece& piece, const int32_t* order, const T* x, const T* gate_up, const T* down,
               float* outputs) {
  thread_local Scratch row_scratch, both_scratch, hidden_scratch;
  const int64_t count = piece.end - piece.begin, expert = s.first + piece.expert, wide = 2 * s.width, step = wide + kPad;
  float *rows = row_scratch.floats(count * s.hidden), *hidden = hidden_scratch.floats(count * s.width);
  float* both = both_scratch.zeros(count * step);
  for (int64_t i = 0; i < count; i++) convert(x + order[piece.begin + i] / s.top_k * s.hidden, rows + i * s.hidden, s.hidden);
  product(count, rows, s.hidden, gate_up + expert * s.hidden * wide, wide, s.hidden, wide, both, step);
  for (int64_t i = 0; i < count; i++) gate(both + i * step, s.width, hidden + i * s.width);
  float* out = outputs + piece.begin * s.out_step();
  std::fill(out, out + count * s.out_step(), 0.0f);
  product(count, hidden, s.width, down + expert * s.width * s.hidden, s.hidden, s.width, s.hidden, out, s.out_step());
}

template <class T>
void combine(const ExpertShape& s, int64_t n, const int32_t* place, const float* weights, bool valid, const float* outputs, T* y) {
  for (int64_t d = 0; d < s.hidden; d += kLanes) {
    const int count = std::min<int64_t>(kLanes, s.hidden - d);
    vf total = {};
    for (int64_t k = 0; valid && k < s.top_k; k++) {
      const float* row = outputs + place[n * s.top_k + k] * s.out_step() + d;
      total += weights[n * s.top_k + k] * (count == kLanes ? load(row) : load(row, count));
    }
    if (count == kLanes) store(y + n * s.hidden + d, total); else store(y + n * s.hidden + d, total, count);
  }
}

template <class T>
bool experts(xla::ffi::ThreadPool& pool, const ExpertShape& s, const T* x, const int32_t* ids, const float* weights, const bool* valid,
             const T* gate_up, const T* down, T* y) {
  std::vector<int32_t> order;
  std::vector<Piece> pieces;
  if (!plan(s, ids, valid, order, pieces)) return false;
  std::vector<int32_t> place(s.tokens * s.top_k);
  for (size_t i = 0; i < order.size(); i++) place[order[i]] = i;
  thread_local Scratch scratch;
  float* outputs = scratch.floats(order.size() * s.out_step());
  parallel_for(pool, pieces.size(), [&](int64_t i) { run_piece(s, pieces[i], order.data(), x, gate_up, down, outputs); });
  const int64_t block = 64, blocks = (s.tokens + block - 1) / block;
  parallel_for(pool, blocks, [&](int64_t b) {
    for (int64_t n = b * block; n < std::min((b + 1) * block, s.tokens); n++) combine(s, n, place.data(), weights, valid[n], outputs, y);
  });
  return true;
}

}  // namespace rex
