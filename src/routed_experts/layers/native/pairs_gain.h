// What multiplying a matrix of bfloat16 in pairs gains on this processor. Some have the instruction and are slower with it: a Xeon was measured at
// 171 Gop/s in pairs and 382 in floats, an EPYC at 1,042 and 614.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "gemm.h"

namespace rex {

// Time of a product of floats over that of the same product in pairs, one thread, with a matrix that stays in the cache. Takes some milliseconds.
inline double measure_pairs_gain() {
  constexpr int64_t rows = 64, depth = 256, cols = 256, rounds = 15;
  std::vector<float> x(rows * depth, 1.0f), out(rows * (cols + kPad));
  std::vector<bf16> halves(rows * depth), w(depth * cols);
  convert(x.data(), halves.data(), rows * depth);
  convert(x.data(), w.data(), std::min(rows, cols) * depth);
  double best[2] = {1e9, 1e9};
  for (int64_t round = 0; round < rounds; round++) {
    for (int pairs = 0; pairs < 2; pairs++) {
      const auto start = std::chrono::steady_clock::now();
      if (pairs) gemm(rows, halves.data(), depth, w.data(), cols, depth, cols, out.data(), cols + kPad, true);
      else gemm(rows, x.data(), depth, w.data(), cols, depth, cols, out.data(), cols + kPad, true);
      best[pairs] = std::min(best[pairs], std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return best[0] / best[1];
}

}  // namespace rex
