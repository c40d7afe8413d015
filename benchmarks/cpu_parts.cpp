// The native kernels with a clock at each part, and probes of how fast this machine reads and multiplies: benchmarks/cpu_parts.py.
// The sources are those of src/, included as they are: a call of a part is put between two looks at the clock, by the thread that makes
// it, which takes part in the work and leaves when all of it is done. Twice 20 ns a call.
#include <chrono>
#include <thread>
#include <vector>

#include "attention.h"
#include "argmax.h"
#include "experts.h"
#include "linear.h"
#include "qk_norm_rope.h"
#include "router.h"
#include "select.h"

namespace rex {

enum Part { kInExperts, kInAttention, kInProjections, kInRouter, kInHead, kInSampler, kInRun, kNumParts };
inline double part_seconds[kNumParts];
constexpr int64_t kWidestRouter = 256;  // columns; the projections of the benchmark model have 512 and more

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class Call>
auto clocked(Part part, const Call& call) {
  struct Clock {
    Part part;
    double since = now();
    ~Clock() { part_seconds[part] += now() - since; }
  } clock{part};
  return call();
}

template <class... Rest>
void clocked_linear(Team& team, int64_t rows, int64_t depth, int64_t cols, Rest... rest) {
  clocked(cols <= kWidestRouter ? kInRouter : kInProjections, [&] { linear(team, rows, depth, cols, rest...); });
}

}  // namespace rex

#define linear(...) clocked_linear(__VA_ARGS__)
#define attention(...) clocked(kInAttention, [&] { attention(__VA_ARGS__); })
#define qk_norm_rope(...) clocked(kInAttention, [&] { qk_norm_rope(__VA_ARGS__); })
#define route(...) clocked(kInRouter, [&] { route(__VA_ARGS__); })
#define experts(...) clocked(kInExperts, [&] { experts(__VA_ARGS__); })
#include "layer_stack.h"
#undef linear
#undef attention
#undef qk_norm_rope
#undef route
#undef experts
#define layer_stack(...) clocked(kInRun, [&] { layer_stack(__VA_ARGS__); })
#define linear(...) clocked(kInHead, [&] { linear(__VA_ARGS__); })
#define argmax_tokens(...) clocked(kInSampler, [&] { argmax_tokens(__VA_ARGS__); })
#include "kernels.cpp"

extern "C" double* rex_part_seconds() { return rex::part_seconds; }

namespace rex {

// The best of `rounds` of body(thread) by all threads at once, in seconds.
template <class Body>
double best_seconds(int threads, int rounds, const Body& body) {
  double best = 1e9;
  for (int round = 0; round < rounds; round++) {
    const double since = now();
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++) team.emplace_back([&, t] { body(t); });
    for (auto& thread : team) thread.join();
    best = std::min(best, now() - since);
  }
  return best;
}

}  // namespace rex

// Operations a second of `threads` that multiply and add in tiles, 4 sums each; 0 where the processor or the system has none.
extern "C" double rex_tile_rate(int threads, int rounds) {
  double rate = 0;
  if constexpr (rex::kHasTiles) {
    if (!rex::request_tiles()) return 0;
    constexpr int64_t kTurns = 1'000'000;
    const double seconds = rex::best_seconds(threads, rounds, [&](int) {
      rex::Tiles tiles;
      tiles.set_rows(2 * rex::kTileSide);
      for (int64_t i = 0; i < kTurns; i++) rex::tile_dot<0, 4, 6>(), rex::tile_dot<1, 4, 7>(), rex::tile_dot<2, 5, 6>(), rex::tile_dot<3, 5, 7>();
    });
    rate = 2.0 * threads * kTurns * 4 * rex::kTileSize * 2 * rex::kTileSide / seconds;
  }
  return rate;
}

// The same in registers, 12 chains each: of float32, or of bfloat16 as pairs of neighbours.
extern "C" double rex_multiply_rate(int threads, int rounds, bool pairs) {
  constexpr int64_t kTurns = 20'000'000 / 12;
  constexpr int kChains = 12;
  std::vector<float> totals(threads);
  const double seconds = rex::best_seconds(threads, rounds, [&](int t) {
    rex::vf sums[kChains], by = rex::vf{} + 0.999f, add = rex::vf{} + 1e-3f;
    const rex::pair x{0x3c003c00u + uint32_t(t)};
    rex::vu column = rex::vu{} + 0x3c003c01u;
    for (int c = 0; c < kChains; c++) sums[c] = rex::vf{} + float(c);
    for (int64_t i = 0; i < kTurns; i++)
#pragma GCC unroll 12
      for (int c = 0; c < kChains; c++) sums[c] = pairs ? rex::add_product(sums[c], &x, column) : sums[c] * by + add;
    for (int c = 1; c < kChains; c++) sums[0] += sums[c];
    totals[t] = rex::sum(sums[0]);
  });
  return totals[0] != 0 ? (pairs ? 4.0 : 2.0) * threads * kTurns * kChains * rex::kLanes / seconds : 0;
}

// Bytes a second that `threads` read from memory together, each its own part of `bytes`, the best of `rounds`.
extern "C" double rex_read_rate(int64_t bytes, int threads, int rounds) {
  std::vector<float> memory(bytes / sizeof(float), 1.0f);
  const int64_t part = memory.size() / threads / 64 * 64;
  std::vector<float> totals(threads);
  const double seconds = rex::best_seconds(threads, rounds, [&](int t) {
    rex::vf sums[4] = {};
    const float* from = memory.data() + t * part;
    for (int64_t i = 0; i + 4 * rex::kLanes <= part; i += 4 * rex::kLanes)
      for (int lane = 0; lane < 4; lane++) sums[lane] += rex::load(from + i + lane * rex::kLanes);
    totals[t] = rex::sum(sums[0] + sums[1] + sums[2] + sums[3]);
  });
  return totals[0] > 0 ? threads * part * sizeof(float) / seconds : 0;
}
