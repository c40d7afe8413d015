// What multiplying rows of bfloat16 in pairs or in tiles gains on this processor; rounding is not timed. Some have instructions for pairs and are
// slower with them: a Xeon was measured at 171 Gop/s in pairs and 382 in floats, an EPYC at 1,042 and 614.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "bf16_gemm.h"

namespace rex {

struct Bf16Gains {
  double pairs, tiles;  // tiles: 0 where the processor has none, NaN where the system refuses them
};

// Whether tiles are used, where they are asked for: the system may refuse them.
inline bool use_bf16(bool pairs, bool tiles) {
  pairs_are_faster = pairs, tiles_are_faster = tiles && request_tiles();
  return tiles_are_faster;
}

// Times of a product of floats over those of the same product in pairs and in tiles, one thread, with a matrix that stays in the cache. Takes
// some milliseconds.
inline Bf16Gains measure_bf16_gains() {
  constexpr int64_t rows = 64, depth = 256, cols = 256, rounds = 15;
  enum Way { kFloats, kPairs, kTiles, kWays };
  std::vector<float> x(rows * depth, 1.0f), out(rows * (cols + kPad));
  std::vector<bf16> rounded(rows * depth), w(depth * cols, bf16{0x3f80});
  double best[kWays] = {1e9, 1e9, 1e9};
  const bool has_tiles = kHasTiles && request_tiles();
  for (int64_t round = 0; round < rounds; round++) {
    for (int way = kFloats; way < (has_tiles ? kWays : kTiles); way++) {
      const RowMatrix<bf16> blocks{rounded.data(), rows, depth, way == kTiles};
      for (int64_t row = 0; row < rows; row++) blocks.set(row, x.data() + row * depth);
      const auto start = std::chrono::steady_clock::now();
      if (way == kFloats) gemm(rows, x.data(), depth, w.data(), cols, depth, cols, out.data(), cols + kPad, true);
      else multiply(blocks, w.data(), cols, cols, out.data(), cols + kPad);
      best[way] = std::min(best[way], std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return {best[kFloats] / best[kPairs], has_tiles ? best[kFloats] / best[kTiles] : kHasTiles ? NAN : 0.0};
}

}  // namespace rex
