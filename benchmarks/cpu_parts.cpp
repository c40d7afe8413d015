// The native kernels with a clock at each part, and a probe of how fast this machine reads: benchmarks/cpu_parts.py.
// The sources are those of src/, included as they are: a call of a part is put between two looks at the clock, by the thread that makes
// it, which takes part in the work and leaves when all of it is done. Twice 20 ns a call.
#include <chrono>
#include <thread>
#include <vector>

#include "attention.h"
#include "choose.h"
#include "experts.h"
#include "linear.h"
#include "prepare.h"
#include "router.h"
#include "select.h"

namespace rex {

enum Part { kExperts, kAttention, kProjections, kRouter, kHead, kSampler, kRun, kParts };
inline double part_seconds[kParts];
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
  clocked(cols <= kWidestRouter ? kRouter : kProjections, [&] { linear(team, rows, depth, cols, rest...); });
}

}  // namespace rex

#define linear(...) clocked_linear(__VA_ARGS__)
#define attention(...) clocked(kAttention, [&] { attention(__VA_ARGS__); })
#define prepare(...) clocked(kAttention, [&] { prepare(__VA_ARGS__); })
#define route(...) clocked(kRouter, [&] { route(__VA_ARGS__); })
#define experts(...) clocked(kExperts, [&] { experts(__VA_ARGS__); })
#include "run.h"
#undef linear
#undef attention
#undef prepare
#undef route
#undef experts
#define run_layers(...) clocked(kRun, [&] { run_layers(__VA_ARGS__); })
#define linear(...) clocked(kHead, [&] { linear(__VA_ARGS__); })
#define choose_tokens(...) clocked(kSampler, [&] { choose_tokens(__VA_ARGS__); })
#include "kernels.cpp"

extern "C" double* rex_part_seconds() { return rex::part_seconds; }

// Bytes a second that `threads` read from memory together, each its own part of `bytes`, the best of `rounds`.
extern "C" double rex_read_rate(int64_t bytes, int threads, int rounds) {
  std::vector<float> memory(bytes / sizeof(float), 1.0f);
  const int64_t part = memory.size() / threads / 64 * 64;
  std::vector<float> totals(threads);
  double best = 0;
  for (int round = 0; round < rounds; round++) {
    const double since = rex::now();
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; t++)
      readers.emplace_back([&, t] {
        rex::vf sums[4] = {};
        const float* from = memory.data() + t * part;
        for (int64_t i = 0; i + 4 * rex::kLanes <= part; i += 4 * rex::kLanes)
          for (int lane = 0; lane < 4; lane++) sums[lane] += rex::load(from + i + lane * rex::kLanes);
        totals[t] = rex::sum(sums[0] + sums[1] + sums[2] + sums[3]);
      });
    for (auto& reader : readers) reader.join();
    best = std::max(best, threads * part * sizeof(float) / (rex::now() - since));
  }
  return totals[0] > 0 ? best : 0;
}
