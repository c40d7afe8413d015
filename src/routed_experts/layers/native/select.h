// Balanced expert selection as layers/balanced_selection/reference.py defines it: one slot after another. Nothing is sorted: each token's K best
// are found in parallel, by K passes over its scores, and a token that goes beyond them finds its best expert with room by one more pass.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"

namespace rex {

constexpr int64_t kSelectTokens = 32;  // of a piece of work

struct SelectShape {
  int64_t tokens, experts, top_k, sources, width, instances;
  bool overflows;
};

struct SelectInput {
  const float* scores;      // [N, E], without NaN
  const int32_t* order;     // [V, E, J], -1 at the tail
  const int32_t* capacity;  // [I], 0 .. K * N
  const int32_t* source;    // [N]
  const bool* valid;        // [N]
};

struct SelectOutput {
  int32_t *ids, *instances;        // [N, K]
  int32_t *rerouted, *overflowed;  // how many slots
};

// Scores as integers in the total order of floats.
using Keys = std::vector<int32_t>;
constexpr int32_t kTaken = std::numeric_limits<int32_t>::min();

inline int32_t key_of(float score) {
  int32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

struct Candidate {
  int32_t key, expert;
  bool selectable() const { return key > key_of(-INFINITY); }
};

// The greatest key of a row, the lower expert first.
inline Candidate best_of(const Keys& row) {
  const int32_t count = row.size();
  int32_t best = kTaken, expert = count;
  for (int32_t e = 0; e < count; e++) best = std::max(best, row[e]);
  for (int32_t e = 0; e < count; e++) expert = std::min(expert, row[e] == best ? e : count);
  return {best, expert};
}

// The K best experts of each token, in order.
inline std::vector<Candidate> top_k_candidates(Team& team, const SelectShape& s, const SelectInput& in) {
  std::vector<Candidate> candidates(s.tokens * s.top_k);
  each_block(team, s.tokens, kSelectTokens, [&](int64_t begin, int64_t end) {
    Keys row(s.experts);
    for (int64_t t = begin; t < end; t++) {
      if (!in.valid[t]) continue;
      std::transform(in.scores + t * s.experts, in.scores + (t + 1) * s.experts, row.begin(), key_of);
      for (int64_t k = 0; k < s.top_k; k++) {
        const Candidate best = candidates[t * s.top_k + k] = best_of(row);
        row[best.expert] = kTaken;
      }
    }
  });
  return candidates;
}

// What is left of each instance and of each expert's instances together.
class RemainingCapacity {
 public:
  RemainingCapacity(const SelectShape& s, const SelectInput& in)
      : s_(s), in_(in), left_(in.capacity, in.capacity + s.instances), room_(s.experts, 0), row_(s.experts) {
    for (int64_t e = 0; e < s.experts; e++)
      for (int64_t j = 0; j < s.width; j++)
        if (const int32_t i = in.order[e * s.width + j]; i >= 0) room_[e] += left_[i];
  }

  const int32_t* replicas(int64_t token, int64_t expert) const { return in_.order + (in_.source[token] * s_.experts + expert) * s_.width; }

  // The first replica with room, which is taken; -1 where none has any.
  int32_t take(int64_t token, int64_t expert) {
    if (room_[expert] == 0) return -1;
    const int32_t* replica = replicas(token, expert);
    for (int64_t j = 0; j < s_.width && replica[j] >= 0; j++)
      if (left_[replica[j]] > 0) return left_[replica[j]]--, room_[expert]--, replica[j];
    return -1;
  }

  // The best expert with room that comes after `last`.
  Candidate best_after(const Candidate& last, int64_t token) {
    const float* scores = in_.scores + token * s_.experts;
    for (int32_t e = 0; e < s_.experts; e++) {
      const int32_t key = key_of(scores[e]);
      const bool after = (key < last.key) | ((key == last.key) & (e > last.expert));
      row_[e] = after & (room_[e] > 0) ? key : kTaken;
    }
    return best_of(row_);
  }

 private:
  const SelectShape& s_;
  const SelectInput& in_;
  std::vector<int32_t> left_, room_;
  Keys row_;
};

// Fill the empty slots of a token with its best experts that it does not hold, ignoring capacities.
inline void overflow_slots(const SelectShape& s, const SelectInput& in, const RemainingCapacity& rooms, int64_t token, const SelectOutput& out) {
  int32_t *ids = out.ids + token * s.top_k, *instances = out.instances + token * s.top_k;
  if (ids[s.top_k - 1] >= 0) return;  // room only shrinks: a token without room once finds none later
  Keys row(s.experts);
  std::transform(in.scores + token * s.experts, in.scores + (token + 1) * s.experts, row.begin(), key_of);
  for (int64_t r = 0; r < s.top_k; r++) {
    if (ids[r] < 0) {
      const Candidate best = best_of(row);
      if (!best.selectable()) return;
      ids[r] = best.expert, instances[r] = rooms.replicas(token, best.expert)[0], ++*out.overflowed;
    }
    row[ids[r]] = kTaken;
  }
}

inline void select(Team& team, const SelectShape& s, const SelectInput& in, const SelectOutput& out) {
  const std::vector<Candidate> candidates = top_k_candidates(team, s, in);
  RemainingCapacity rooms(s, in);
  std::vector<int64_t> passed(s.tokens, 0);
  std::vector<Candidate> last(s.tokens);
  std::fill_n(out.ids, s.tokens * s.top_k, -1);
  std::fill_n(out.instances, s.tokens * s.top_k, -1);
  *out.rerouted = *out.overflowed = 0;
  for (int64_t slot = 0; slot < s.top_k * s.tokens; slot++) {
    const int64_t t = slot % s.tokens, at = t * s.top_k + slot / s.tokens;
    for (int64_t& rank = passed[t]; in.valid[t] && out.ids[at] < 0; rank++) {
      last[t] = rank < s.top_k ? candidates[t * s.top_k + rank] : rooms.best_after(last[t], t);
      if (!last[t].selectable()) break;
      if ((out.instances[at] = rooms.take(t, last[t].expert)) < 0) continue;
      out.ids[at] = last[t].expert;
      *out.rerouted += rank >= s.top_k;
    }
  }
  for (int64_t t = 0; s.overflows && t < s.tokens; t++)
    if (in.valid[t]) overflow_slots(s, in, rooms, t, out);
}

}  // namespace rex
