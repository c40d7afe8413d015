// Tiles of 16 rows of 64 bytes, which a processor with AMX multiplies: `tile_dot` adds the products of 16 rows of 32 numbers of bfloat16 with
// 32 rows of 16 numbers to 16 rows of 16 floats. Rows that are multiplied from the left are read as they are; of those from the right,
// each row of a tile has two, as pairs of neighbours.
// A sum takes products of even and of odd numbers apart, in float32 with one rounding each, and adds both to the tile last; subnormal
// numbers are 0. Source: Intel's Architectures Software Developer's Manual, volume 2, TDPBF16PS.
// With REX_EMULATED_TILES the same in plain C++, for tests.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define REX_HAS_TILES
#endif

namespace rex {

constexpr int64_t kTileSide = 16;  // rows, floats of a row, and pairs of a row
static_assert(kTileSide % kLanes == 0);
constexpr int64_t kTileSize = kTileSide * kTileSide;

#if defined(REX_EMULATED_TILES)

constexpr bool kHasTiles = true;
inline bool request_tiles() { return true; }

struct EmulatedTiles {
  int64_t rows[8] = {};
  uint32_t words[8][kTileSize];
};
inline thread_local EmulatedTiles tiles;

inline void configure_tiles(int64_t first, int64_t second) {
  const int64_t rows[8] = {first, first, second, second, first, second, kTileSide, kTileSide};
  std::memcpy(tiles.rows, rows, sizeof(rows));
}
inline void release_tiles() { std::memset(tiles.rows, 0, sizeof(tiles.rows)); }
template <int T>
inline void tile_load(const void* from, int64_t step) {
  for (int64_t row = 0; row < tiles.rows[T]; row++) std::memcpy(tiles.words[T] + row * kTileSide, static_cast<const char*>(from) + row * step, 64);
}
template <int T>
inline void tile_store(void* to, int64_t step) {
  for (int64_t row = 0; row < tiles.rows[T]; row++) std::memcpy(static_cast<char*>(to) + row * step, tiles.words[T] + row * kTileSide, 64);
}
template <int T>
inline void tile_zero() { std::memset(tiles.words[T], 0, sizeof(tiles.words[T])); }

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float half_of(uint32_t pair, int which) {
  const uint32_t bits = which == 0 ? pair << 16 : pair & 0xffff0000u;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return flushed(wide);
}
template <int Sums, int Left, int Right>
inline void tile_dot() {
  for (int64_t row = 0; row < tiles.rows[Sums]; row++)
    for (int64_t col = 0; col < kTileSide; col++) {
      float parts[2] = {}, sum;
      for (int64_t k = 0; k < kTileSide; k++)
        for (int which = 0; which < 2; which++) {
          const float a = half_of(tiles.words[Left][row * kTileSide + k], which), b = half_of(tiles.words[Right][k * kTileSide + col], which);
          parts[which] = flushed(std::fma(a, b, parts[which]));
        }
      uint32_t& word = tiles.words[Sums][row * kTileSide + col];
      std::memcpy(&sum, &word, sizeof(sum));
      sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
      std::memcpy(&word, &sum, sizeof(sum));
    }
}

#elif defined(REX_HAS_TILES)

constexpr bool kHasTiles = true;

// Asks the system for tiles, for all threads of this process; false where it has none to give.
inline bool request_tiles() {
  constexpr long kRequestState = 0x1023, kTileState = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestState, kTileState) == 0;
}

// Tiles 0 and 1 are sums, of `first` rows, 2 and 3 of `second`; 4 and 5 are multiplied from the left, 6 and 7 from the right.
inline void configure_tiles(int64_t first, int64_t second) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } shape;
  const int64_t rows[8] = {first, first, second, second, first, second, kTileSide, kTileSide};
  for (int t = 0; t < 8; t++) shape.rows[t] = rows[t], shape.bytes[t] = rows[t] == 0 ? 0 : 64;
  asm volatile("ldtilecfg %0" ::"m"(shape));
}
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
[[gnu::always_inline]] inline void tile_load(const void* from, int64_t step) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(T) : "memory");
}
template <int T>
[[gnu::always_inline]] inline void tile_store(void* to, int64_t step) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(T) : "memory");
}
template <int T>
[[gnu::always_inline]] inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int Sums, int Left, int Right>
[[gnu::always_inline]] inline void tile_dot() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right)); }

#else

constexpr bool kHasTiles = false;
inline bool request_tiles() { return false; }
inline void configure_tiles(int64_t, int64_t) {}  // this and the rest are not called
inline void release_tiles() {}
template <int T>
inline void tile_load(const void*, int64_t) {}
template <int T>
inline void tile_store(void*, int64_t) {}
template <int T>
inline void tile_zero() {}
template <int Sums, int Left, int Right>
inline void tile_dot() {}

#endif

}  // namespace rex
