// Vectors of as many floats as a register holds, and the loads and stores of every weight dtype. Registers hold 16 floats with AVX-512,
// else vectors have 8: a vector that is wider than a register goes through memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace rex {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));
typedef _Float16 vx __attribute__((vector_size(2 * kLanes)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  _Float16 value;
};
struct e4m3 {  // a code of 8 bits: sign, exponent less 7, three bits behind the point; no infinity
  uint8_t bits;
};
struct kv8 {  // the same as a pool holds it, where a number may be NaN: layers/kv_format.py
  uint8_t bits;
};

struct int4 {  // codes of 4 bits of two neighbouring inputs, the first in the lower half: whole numbers plus 8
  uint8_t bits;
};
struct e2m1 {  // likewise: sign, exponent less 1, one bit behind the point
  uint8_t bits;
};

struct [[gnu::may_alias]] pair {  // two neighbours of bfloat16, the first in the lower half
  uint32_t bits;
};
struct [[gnu::may_alias]] floats {  // two neighbours
  float first, second;
};
struct [[gnu::may_alias]] lifted {  // 2^60 times a number of x
  float number;
};
struct vff {  // vectors of the first and of the second neighbours
  vf first, second;
};

// Numbers of a row of x, or inputs of a matrix, that one T holds.
template <class T>
constexpr int kNeighbours = 1;
template <>
inline constexpr int kNeighbours<pair> = 2;
template <>
inline constexpr int kNeighbours<floats> = 2;
template <>
inline constexpr int kNeighbours<int4> = 2;
template <>
inline constexpr int kNeighbours<e2m1> = 2;

template <class Vector, class T>
inline Vector read(const T* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));  // unaligned; one instruction
  return v;
}

// Conversions by name: GCC converts vectors of integers by halves, and of float16 number by number. `narrowed`: of numbers below 256.
#if defined(__AVX512F__)
inline vu widened(vh bits) { return (vu)_mm512_cvtepu16_epi32((__m256i)bits); }
inline vh sign_extended(const void* p) { return (vh)_mm256_cvtepi8_epi16(read<__m128i>(static_cast<const __m128i*>(p))); }
inline vb narrowed(vu bits) { return (vb)_mm512_cvtepi32_epi8((__m512i)bits); }
#elif defined(__AVX2__)
inline vu widened(vh bits) { return (vu)_mm256_cvtepu16_epi32((__m128i)bits); }
inline vh sign_extended(const void* p) { return (vh)_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
inline vb narrowed(vu bits) {
  const __m256i words = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);  // of each half, twice
  const __m128i four = _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  vb narrow;
  _mm_storel_epi64(reinterpret_cast<__m128i*>(&narrow), _mm_packus_epi16(four, four));
  return narrow;
}
#else
inline vu widened(vh bits) { return __builtin_convertvector(bits, vu); }
inline vh sign_extended(const void* p) {
  const vh code = __builtin_convertvector(read<vb>(static_cast<const vb*>(p)), vh);
  return code | (code >> 7) * 0xff00;
}
inline vb narrowed(vu bits) { return __builtin_convertvector(bits, vb); }
#endif
// Floats of the bits of float16, and the bits of floats that are rounded to nearest, ties to even.
#if defined(__AVX512F__)
inline vf from_half(vh bits) { return (vf)_mm512_cvtph_ps((__m256i)bits); }
inline vh to_half(vf v) { return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__F16C__)
inline vf from_half(vh bits) { return (vf)_mm256_cvtph_ps((__m128i)bits); }
inline vh to_half(vf v) { return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
inline vf from_half(vh bits) { return __builtin_convertvector((vx)bits, vf); }
inline vh to_half(vf v) { return (vh)__builtin_convertvector(v, vx); }
#endif

inline vf load(const float* p) { return read<vf>(p); }
inline vf load(const bf16* p) { return (vf)(widened(read<vh>(p)) << 16); }
inline vf load(const f16* p) { return from_half(read<vh>(p)); }
// The bits of a code of 8 bits in float16 are 2^-8 of it, for subnormal numbers too: the exponent has a bit more, behind the sign.
inline vh half_of_code(const void* p) { return sign_extended(p) << 7 & 0xbfff; }
constexpr int kHalfExponent = 8;
template <int Exponent>
constexpr float kPowerOf2 = uint64_t(1) << Exponent;
inline vf load(const e4m3* p) { return from_half(half_of_code(p)) * kPowerOf2<kHalfExponent>; }
inline vf load(const kv8* p) {  // NaN is the code of all ones
  const vh half = half_of_code(p);
  return from_half(half | ((vh)((half & 0x7fff) == vh{} + 0x3f80) & 0x7c00)) * kPowerOf2<kHalfExponent>;
}

// Neighbouring vectors of numbers over a power of two: 2^8 for codes of 8 bits. Where sums are multiplied by a scale, the power is part of it, and
// no number is multiplied.
template <int Vectors, class W>
[[gnu::always_inline]] inline void load_line(const W* p, vf (&line)[Vectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) line[v] = load(p + v * kLanes);
}
template <int Vectors>
[[gnu::always_inline]] inline void load_line(const e4m3* p, vf (&line)[Vectors]) {
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  if constexpr (Vectors % 2 == 0) {  // both vectors of a register of 16 bits
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v += 2) {
      const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + v * kLanes)));
      const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
      line[v] = from_half((vh)_mm256_castsi256_si128(halves));
      line[v + 1] = from_half((vh)_mm256_extracti128_si256(halves, 1));
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) line[v] = from_half(half_of_code(p + v * kLanes));
}

// Without a conversion: the bits of a code in a float are 2^-120 of it. The numbers of the least exponents are subnormal floats then
// (KeepSubnormal), and rows are lifted, so that sums are 2^-60 of themselves. Exact, while numbers of a row are below 2^67 and sums are 0 or above 2^-66.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
constexpr bool kLiftsRows = true;
template <int Vectors>
[[gnu::always_inline]] inline void load_bits(const e4m3* p, vf (&line)[Vectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) {
    const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + v * kLanes)));
    line[v] = (vf)((vu)_mm256_slli_epi32(codes, 20) & 0x87f00000);
  }
}
// Quads: four vectors, of which vector v has numbers v, v + 4, v + 8 .. of 32. 32 codes become quads without moves between lanes.
[[gnu::always_inline]] inline void load_quads(const e4m3* p, vf (&quads)[4]) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), bits = _mm256_set1_epi16(static_cast<int16_t>(0x87f0));
  const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 4), bits);
  const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(codes, 4), bits);
  quads[0] = (vf)_mm256_slli_epi32(even, 16), quads[1] = (vf)_mm256_slli_epi32(odd, 16);
  quads[2] = (vf)_mm256_blend_epi16(even, _mm256_setzero_si256(), 0x55), quads[3] = (vf)_mm256_blend_epi16(odd, _mm256_setzero_si256(), 0x55);
}
// Transposes both halves of four registers.
[[gnu::always_inline]] inline void transpose_halves(vf (&rows)[4]) {
  const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpacklo_ps(rows[2], rows[3]);
  const __m256 c = _mm256_unpackhi_ps(rows[0], rows[1]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
  rows[0] = (vf)_mm256_shuffle_ps(a, b, 0x44), rows[1] = (vf)_mm256_shuffle_ps(a, b, 0xee);
  rows[2] = (vf)_mm256_shuffle_ps(c, d, 0x44), rows[3] = (vf)_mm256_shuffle_ps(c, d, 0xee);
}
[[gnu::always_inline]] inline void to_quads(vf (&vectors)[4]) {
  const __m256 a = vectors[0], b = vectors[1], c = vectors[2], d = vectors[3];
  vectors[0] = (vf)_mm256_permute2f128_ps(a, c, 0x20), vectors[1] = (vf)_mm256_permute2f128_ps(a, c, 0x31);
  vectors[2] = (vf)_mm256_permute2f128_ps(b, d, 0x20), vectors[3] = (vf)_mm256_permute2f128_ps(b, d, 0x31);
  transpose_halves(vectors);
}
[[gnu::always_inline]] inline void from_quads(vf (&vectors)[4]) {
  transpose_halves(vectors);
  const __m256 a = vectors[0], b = vectors[1], c = vectors[2], d = vectors[3];
  vectors[0] = (vf)_mm256_permute2f128_ps(a, b, 0x20), vectors[1] = (vf)_mm256_permute2f128_ps(c, d, 0x20);
  vectors[2] = (vf)_mm256_permute2f128_ps(a, b, 0x31), vectors[3] = (vf)_mm256_permute2f128_ps(c, d, 0x31);
}
#else
constexpr bool kLiftsRows = false;
#endif
constexpr int kBitsExponent = 120, kLift = 60;

// Makes this thread take subnormal numbers for 0, as threads of XLA do, or for what they are, while a product runs.
template <bool kFlush>
class SubnormalMode {
#if defined(__SSE__)
 public:
  SubnormalMode() : before_(_mm_getcsr()) { _mm_setcsr(kFlush ? before_ | 0x8040u : before_ & ~0x8040u); }
  ~SubnormalMode() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
 public:
  SubnormalMode() {
    constexpr uint64_t kBit = 1 << 24;
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(kFlush ? before_ | kBit : before_ & ~kBit));
  }
  ~SubnormalMode() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#else
 public:
  SubnormalMode() {}
#endif
};
using FlushSubnormal = SubnormalMode<true>;
using KeepSubnormal = SubnormalMode<false>;

// What codes of 4 bits are, in bfloat16.
template <class W>
constexpr uint16_t kBf16Values[16] = {};
template <>
alignas(32) inline constexpr uint16_t kBf16Values<int4>[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
template <>
alignas(32) inline constexpr uint16_t kBf16Values<e2m1>[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

#if defined(__AVX512F__)
template <class W>
inline vff decode(const W* p) {  // looks each half of a byte up
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512 table = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(kBf16Values<W>))), 16);
  return {(vf)_mm512_permutexvar_ps(codes, table), (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table)};
}
#elif defined(__AVX2__)
inline vf values(const int4*, __m256i codes) { return (vf)_mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8))); }
inline vf values(const e2m1*, __m256i codes) {  // looks three bits of each up
  const __m256 sizes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
  return (vf)((vu)sizes | ((vu)codes << 28 & 0x80000000));
}
// The numbers of the first (0) or of the second inputs (1) of four neighbouring vectors. Both bytes of 32 bfloat16 are looked up at once; they
// become words, and words become floats, within the halves of a register, so that each half begins with a half of every vector.
template <int Input>
[[gnu::always_inline]] inline void load_half(const e2m1* p, vf (&line)[4]) {
  const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), zero = _mm256_setzero_si256();
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), order);
  const __m256i codes = _mm256_and_si256(Input == 0 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(lower, codes), high = _mm256_shuffle_epi8(upper, codes);
  const __m256i words[] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    line[2 * v] = (vf)_mm256_unpacklo_epi16(zero, words[v]);
    line[2 * v + 1] = (vf)_mm256_unpackhi_epi16(zero, words[v]);
  }
}
template <class W>
inline vff decode(const W* p) {
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {values(p, _mm256_and_si256(codes, _mm256_set1_epi32(15))), values(p, _mm256_srli_epi32(codes, 4))};
}
#else
inline vf values(const int4*, vh codes) { return __builtin_convertvector(__builtin_convertvector(codes, vi) - 8, vf); }
inline vf values(const e2m1*, vh codes) {  // their bits in float16 are 2^-14 of them, for subnormal numbers too
  return from_half((codes & 7) << 9 | (codes & 8) << 12) * 16384.0f;
}
template <class W>
inline vff decode(const W* p) {
  const vh codes = __builtin_convertvector(read<vb>(p), vh);
  return {values(p, codes & 15), values(p, codes >> 4)};
}
#endif
inline vff load(const int4* p) { return decode(p); }
inline vff load(const e2m1* p) { return decode(p); }
inline vff load(const floats* p) { return {load(&p->first), load(&p->first + kLanes)}; }  // as `store` has put them
inline vf load(const lifted* p) { return load(&p->number); }

inline vu load(const pair* p) { return read<vu>(p); }
template <class W>
inline vu zip(const W* both) {  // pairs of the two numbers of each byte; bfloat16 has all of them
  const vff numbers = load(both);
  return (vu)numbers.first >> 16 | ((vu)numbers.second & 0xffff0000u);
}
inline vu zip(const bf16* first, const bf16* second) {  // pairs of one number of each
  const vh a = read<vh>(first), b = read<vh>(second);
#if defined(__AVX512F__)
  return (vu)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                     14, 30, 15, 31);
#else
  return (vu)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

inline vu zip(const e4m3* first, const e4m3* second) {  // bfloat16 has all of their numbers
  return (vu)load(first) >> 16 | ((vu)load(second) & 0xffff0000u);
}

// Neighbouring vectors of pairs.
template <int Vectors, class W>
[[gnu::always_inline]] inline void zip(const W* first, const W* second, vu (&pairs)[Vectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) pairs[v] = zip(first + v * kLanes, second + v * kLanes);
}
template <int Vectors, class W>
[[gnu::always_inline]] inline void zip(const W* both, vu (&pairs)[Vectors]) {
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
  // A line of the cache. Both codes of a byte are shifted to the bottom of a word each, which is looked up by its lowest five bits: the fifth
  // is of no account. Each shift makes two pairs of a quarter of a quarter of the line, so pairs of bytes are put there before.
  if constexpr (Vectors == 4) {
    const __m512i order = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kBf16Values<W>)));
    const __m512i codes = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(both));
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const __m512i shifts = _mm512_add_epi8(_mm512_set1_epi64(0x000c000800040000), _mm512_set1_epi16(16 * v));
      pairs[v] = (vu)_mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(shifts, codes), table);
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v++) pairs[v] = zip(both + v * kLanes);
}
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// The upper and the lower bytes of the bfloat16 numbers of codes 0..127.
struct CodeTable {
  uint8_t upper[128], lower[128];
};
constexpr CodeTable code_table() {
  CodeTable table{};
  for (int code = 0; code < 128; code++) {
    int exponent = (code >> 3) + 120, rest = code & 7;  // of bfloat16, and three bits behind the point
    if (code < 8) {  // subnormal: shift until a one stands before the point
      exponent = 121;
      while (rest != 0 && rest < 8) rest *= 2, exponent--;
      rest &= 7;
      if (code == 0) exponent = 0;
    }
    table.upper[code] = exponent >> 1, table.lower[code] = (exponent & 1) << 7 | rest << 4;
  }
  return table;
}
alignas(64) inline constexpr CodeTable kCodeTable = code_table();

// A line of the cache of codes: looks both bytes of each number up. Interleaving works within quarters of a register, so quarters are put
// where the four vectors take them from.
[[gnu::always_inline]] inline void zip(const e4m3* first, const e4m3* second, vu (&pairs)[4]) {
  const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sign = _mm512_set1_epi8(char(0x80));
  const __m512i a = _mm512_permutexvar_epi32(quarters, _mm512_loadu_si512(first)), b = _mm512_permutexvar_epi32(quarters, _mm512_loadu_si512(second));
  const __m512i both[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(kCodeTable.upper), both[half], _mm512_load_si512(kCodeTable.upper + 64));
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, both[half], sign, 0xf8);  // magnitude | (both & sign)
    const __m512i lower = _mm512_permutex2var_epi8(_mm512_load_si512(kCodeTable.lower), both[half], _mm512_load_si512(kCodeTable.lower + 64));
    pairs[2 * half] = (vu)_mm512_unpacklo_epi8(lower, upper), pairs[2 * half + 1] = (vu)_mm512_unpackhi_epi8(lower, upper);
  }
}
#endif

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(pair* p, vu v) { std::memcpy(p, &v, sizeof(v)); }
inline void store(floats* p, vff v) { store(&p->first, v.first), store(&p->first + kLanes, v.second); }
inline void store(bf16* p, vf v) {  // to nearest, ties to even; a NaN stays one
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu nan = (bits >> 16) | 0x40;
  vh narrow = __builtin_convertvector(v == v ? rounded : nan, vh);
  std::memcpy(p, &narrow, sizeof(narrow));
}
inline void store(f16* p, vf v) {
  const vh narrow = to_half(v);
  std::memcpy(p, &narrow, sizeof(narrow));
}
inline void store(kv8* p, vf v) {  // clipped to 448, to nearest, ties to even; a NaN stays one: as `to_stored` of layers/kv_format.py rounds
  const vu bits = (vu)v;
  const vf largest = vf{} + 448.0f, least = vf{} + 0.015625f;  // 2^-6, of those that are not subnormal
  vf size = (vf)(bits & 0x7fffffff);
  size = size > largest ? largest : size;
  const vu wide = (vu)size, normal = ((wide + 0x7ffff + ((wide >> 20) & 1)) >> 20) - (120 << 3);
  const vu small = (vu)(size + 16384.0f) - 0x46800000;  // neighbours are 2^-9 apart there, as subnormal numbers are
  const vu code = size == size ? (size < least ? small : normal) : vu{} + 0x7f;
  const vb narrow = narrowed(code | (bits >> 24 & 0x80));
  std::memcpy(p, &narrow, sizeof(narrow));
}

// One number.
inline float number(float x) { return x; }
inline float number(f16 x) { return x.value; }
inline float number(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}
inline void put(float* p, float x) { *p = x; }
inline void put(f16* p, float x) { p->value = static_cast<_Float16>(x); }
inline void put(bf16* p, float x) {  // as `store` rounds
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  p->bits = (x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000) >> 16;
}

// The first `count` lanes; the others are 0 and memory behind them is not touched.
template <class T>
inline auto load(const T* p, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}
template <class T>
inline void store(T* p, vf v, int count) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(T));
}

// As many lanes as there are, at most all.
template <class T>
inline vf load_upto(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load(p, count);
}
template <class T>
inline void store_upto(T* p, vf v, int64_t count) {
  if (count >= kLanes) store(p, v); else store(p, v, count);
}

// sums + a * b, of floats or of pairs, both products of which are added in float32: by one instruction, where the processor has it
// (which takes subnormal numbers for 0).
// By name: GCC would multiply and add apart in some loops, and round twice.
#if defined(__AVX512F__)
inline vf add_products(vf sums, vf a, vf b) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums); }
#elif defined(__FMA__)
inline vf add_products(vf sums, vf a, vf b) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums); }
#else
inline vf add_products(vf sums, vf a, vf b) { return sums + a * b; }
#endif
#if defined(__AVX512BF16__)
inline vf add_products(vf sums, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }
#else
inline vf add_products(vf sums, vu a, vu b) {
  const vu high = vu{} + 0xffff0000u;
  sums += (vf)(a & high) * (vf)(b & high);
  return sums + (vf)(a << 16) * (vf)(b << 16);
}
#endif
// The same with one number of x, or one pair, in all lanes of a.
#if defined(__FMA__) && !defined(__AVX512F__)
inline vf add_product(vf sums, const float* x, vf column) { return add_products(sums, (vf)_mm256_broadcast_ss(x), column); }
#else
inline vf add_product(vf sums, const float* x, vf column) { return sums + *x * column; }
#endif
inline vf add_product(vf sums, const lifted* x, vf column) { return add_product(sums, &x->number, column); }
inline vf add_product(vf sums, const floats* x, vff columns) { return add_product(add_product(sums, &x->first, columns.first), &x->second, columns.second); }
inline vf add_product(vf sums, const pair* x, vu column) { return add_products(sums, vu{} + x->bits, column); }

// Keeps a vector in a register: GCC would read it from memory at each use.
template <class Vector>
[[gnu::always_inline]] inline void keep(Vector& v) {
#if defined(__x86_64__) && (defined(__AVX512F__) || defined(__AVX__))
  asm("" : "+v"(v));
#endif
}

// As `T` holds them.
template <class T>
inline vf rounded(vf v) {
  if constexpr (std::is_same_v<T, float>) return v;
  T narrow[kLanes];
  store(narrow, v);
  return load(narrow);
}

// Rows between memory and float scratch.
template <class From, class To>
inline void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store(to + i, load(from + i, count - i), count - i);
}

template <class From, class To>
inline void scale_to(const From* from, float factor, To* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_upto(to + i, load_upto(from + i, count - i) * factor, count - i);
}

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
inline float sum(vf v) {
#if defined(__AVX512F__)
  const v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const v8 a = v;
#endif
  const v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

inline float largest(vf v) {
#if defined(__AVX512F__)
  const v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const v8 c = a > b ? a : b;
#else
  const v8 c = v;
#endif
  const v4 d = __builtin_shufflevector(c, c, 0, 1, 2, 3), e = __builtin_shufflevector(c, c, 4, 5, 6, 7);
  const v4 f = d > e ? d : e;
  return std::max(std::max(f[0], f[2]), std::max(f[1], f[3]));
}

// True in the first `count` lanes.
inline vi first_lanes(int64_t count) {
#if defined(__AVX512F__)
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
  return lane < (vi{} + static_cast<int32_t>(std::min<int64_t>(count, kLanes)));
}

// Exchange the lanes of a that have bit S with those of b that have it not.
template <int S>
inline void exchange(vf& a, vf& b) {
  const vf x = a, y = b;
#if defined(__AVX512F__)
  if constexpr (S == 8) {
    a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    b = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  if constexpr (S == 4) {
    a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    b = __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  if constexpr (S == 2) {
    a = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    b = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  if constexpr (S == 1) {
    a = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    b = __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
#else
  if constexpr (S == 4) {
    a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);
    b = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  if constexpr (S == 2) {
    a = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
    b = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  if constexpr (S == 1) {
    a = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
    b = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
  }
#endif
}
template <int S>
inline void exchange_all(vf (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i++)
    if ((i & S) == 0) exchange<S>(rows[i], rows[i + S]);
}

// Transpose a square of lanes: row i becomes column i.
inline void transpose(vf (&rows)[kLanes]) {
  if constexpr (kLanes > 8) exchange_all<8>(rows);
  exchange_all<4>(rows), exchange_all<2>(rows), exchange_all<1>(rows);
}

// Floats of a thread, grown on demand and never freed; the first is aligned to a cache line.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      const int64_t size = (count + kLanes - 1) / kLanes * kLanes;
      data_ = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }
  template <class T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(floats((count * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
  }
  float* zeros(int64_t count) {
    std::memset(floats(count), 0, count * sizeof(float));
    return data_;
  }
  int64_t bytes() const { return size_ * int64_t(sizeof(float)); }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Scratch for one call on any thread, kept for later calls. malloc may return megabytes to the
// system after each call, and the next call zeroes them page by page: 2 % of a step of 1,024 tokens.
class LentScratch {
 public:
  LentScratch() {
    const std::lock_guard hold(idle().guard);
    if (idle().all.empty()) idle().all.push_back(std::make_unique<Scratch>());
    mine_ = std::move(idle().all.back());
    idle().all.pop_back();
  }
  LentScratch(const LentScratch&) = delete;
  ~LentScratch() {
    const std::lock_guard hold(idle().guard);
    idle().all.push_back(std::move(mine_));
  }
  Scratch* operator->() { return mine_.get(); }

  // Of all that no call holds.
  static int64_t bytes() {
    const std::lock_guard hold(idle().guard);
    int64_t total = 0;
    for (const auto& scratch : idle().all) total += scratch->bytes();
    return total;
  }

 private:
  struct Idle {
    std::mutex guard;
    std::vector<std::unique_ptr<Scratch>> all;
  };
  static Idle& idle() {
    static Idle* const idle = new Idle;  // never destroyed: a thread may still run when a process ends
    return *idle;
  }
  std::unique_ptr<Scratch> mine_;
};

// Prefetch memory that will be read soon; any address is allowed. Always inlined: GCC treats a function with no other effect as
// empty and drops its calls. Cache: the first or the second.
template <int Cache = 1, class T>
[[gnu::always_inline]] inline void prefetch(const T* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 4 - Cache);
}

// Read one number of each cache line and discard it.
template <class T>
inline void touch(const T* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) (void)*reinterpret_cast<const volatile char*>(p + i);
}

// e^x, relative error below 2e-7 (Cephes, expf: 2^n times a polynomial); x is clipped to [-87.3, 88]; NaN stays NaN.
inline vf exp(vf x) {
  const vf lowest = vf{} - 87.3f, highest = vf{} + 88.0f;
  vf y = x < lowest ? lowest : x;
  y = y > highest ? highest : y;
  const vf shifted = y * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const vf n = shifted - 12582912.0f;
  vf r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

}  // namespace rex
