// out[rows, cols] += x[rows, depth] * w[depth, cols] in float32, or = where `fresh`, for weights of any dtype, read in place.
// Few rows are bound by memory: w is walked along its rows, kStreamDepth at a time, as memory and prefetchers prefer. Many rows are bound by
// arithmetic: tiles of kTileRows rows by kTileVectors vectors stay in registers throughout, while a panel of w streams from the second-level
// cache and the next kPrefetchColumns columns are prefetched from memory.
// Rows of bfloat16 are multiplied with weights of bfloat16 as pairs of neighbours: twice the work an instruction, sums in float32.
// A matrix of codes has a scale for each group of inputs and each output, or 128 of them: products of a group are added alone, and their sum is
// multiplied by the scale once, as it is added to out. Codes of 4 bits are two neighbouring inputs a byte, and are multiplied by two neighbours of a row.
// All paths add the same products in the same order: a row's result is bitwise independent of the other rows of the call.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace rex {

constexpr int kTileRows = 6;
constexpr int kTileVectors = kRegisters / 8;  // of a tile at most: its sums fill three quarters of the registers
constexpr int kStreamRows = kRegisters > 16 ? 24 : 8;  // up to this many rows are streamed; more of them pay for a panel
constexpr int kStreamFloatRows = 24, kStreamCodeRows = kRegisters > 16 ? 24 : 5;  // with a matrix of floats, and of codes
constexpr int kStreamE4m3Rows = kLiftsRows ? 8 : kStreamCodeRows;
static_assert(std::min(kStreamRows, kStreamFloatRows) + 1 >= kTileRows);  // of plain weights the first tile of a panel is a full one
constexpr int64_t kCodeDepth = 32;  // rows of codes, walked side by side
constexpr int kChains = kRegisters > 16 ? kTileVectors : 8;  // vectors of a tile of codes with one row: an addition to a sum waits for the one before it
constexpr int kTwoRowVectors = 4;  // and with two rows
constexpr int kStreamDepth = kRegisters / 4;  // rows of w, or pairs of them, walked side by side
constexpr int kLineBytes = 64;  // of the cache
constexpr int kStreamAhead = kRegisters > 16 ? 0 : 16;  // rows of w that lie between a read and its prefetch, at least
constexpr int64_t kStreamFloats = 8192;  // of out that stay in the first cache
template <class U, class W>
constexpr int kRowsOf = kNeighbours<U> / kNeighbours<W>;  // of w, in one of what is multiplied
constexpr int kPackAhead = 16;   // rows
constexpr int64_t kPanelFloats = 512;  // of a column of a panel: 128 KiB, which stay in the second cache
constexpr int64_t kPrefetchEvery = 8;  // rows of a panel between two prefetches
constexpr int64_t kPrefetchColumns = 64;  // of the panels that are prefetched together: memory brings neighbouring lines faster
constexpr int kPad = kLanes;     // between rows of scratch: rows a power of two apart would share a few lines of the cache

enum class ScaleDtype { kFloat32, kBf16 };

// Scales of a matrix, float32 or bfloat16, from its row `row` and column `col` on, where `first` is the first one of all: a row for each group,
// in which 2^shift columns share one. Vectors lie within such a span.
struct ScaleRows {
  const void* first;
  ScaleDtype dtype;
  int64_t ld;
  int shift;
  int64_t col = 0;
  int64_t row = 0;
  vf at(int64_t group, int64_t c) const { return dtype == ScaleDtype::kBf16 ? of<bf16>(group, c) : of<float>(group, c); }
  vf at(int64_t group, int64_t c, int count) const {  // part of a vector: no span has one
    return dtype == ScaleDtype::kBf16 ? load(row_of<bf16>(group) + col + c, count) : load(row_of<float>(group) + col + c, count);
  }
  ScaleRows below(int64_t rows) const { return {first, dtype, ld, shift, col, row + rows}; }

 private:
  template <class T>
  const T* row_of(int64_t group) const { return static_cast<const T*>(first) + (row + group) * ld; }
  template <class T>
  vf of(int64_t group, int64_t c) const {
    const T* const own = row_of<T>(group);
    return shift == 0 ? load(own + col + c) : vf{} + number(own[(col + c) >> shift]);
  }
};
inline ScaleRows operator+(const ScaleRows& scales, int64_t cols) {
  return {scales.first, scales.dtype, scales.ld, scales.shift, scales.col + cols, scales.row};
}

// A matrix of codes W, or some of its columns. `group`: a multiple of 16.
template <class W>
struct CodesOf {
  const W* codes;
  ScaleRows scales;  // [ceil(depth / group)]
  int64_t group;
};
template <class W>
inline CodesOf<W> operator+(CodesOf<W> w, int64_t cols) { return {w.codes + cols, w.scales + cols, w.group}; }

// The same, of a format that is not known when this is compiled.
enum class Format { kE4m3, kInt4, kE2m1 };
struct Codes {
  Format format;
  const uint8_t* codes;
  ScaleRows scales;
  int64_t group;
  int64_t inputs_of_byte() const { return format == Format::kE4m3 ? 1 : 2; }
  template <class Body>
  void with(const Body& body) const {
    if (format == Format::kInt4) return body(CodesOf<int4>{reinterpret_cast<const int4*>(codes), scales, group});
    if (format == Format::kE2m1) return body(CodesOf<e2m1>{reinterpret_cast<const e2m1*>(codes), scales, group});
    body(CodesOf<e4m3>{reinterpret_cast<const e4m3*>(codes), scales, group});
  }
};
inline Codes operator+(Codes w, int64_t cols) { return {w.format, w.codes + cols, w.scales + cols, w.group}; }

// A matrix of a stack.
template <class W>
inline const W* matrix_of(const W* stack, int64_t index, int64_t depth, int64_t cols) {
  return stack + index * depth * cols;
}
inline Codes matrix_of(Codes stack, int64_t index, int64_t depth, int64_t cols) {
  const int64_t groups = (depth + stack.group - 1) / stack.group, rows = depth / stack.inputs_of_byte();
  return {stack.format, stack.codes + index * rows * cols, stack.scales.below(index * groups), stack.group};
}

// Prefetches rows of a matrix one by one, while other work goes on; in bytes, so that tiles are the same for all weights.
struct Prefetcher {
  const char* row = nullptr;
  int64_t step = 0, left = 0, width = 0;  // to the next row, rows, bytes of a row
  void advance() {
    if (left == 0) return;
    prefetch(row, width);
    row += step, left--;
  }
};

template <int N>
constexpr std::integral_constant<int, N> constant{};

// The numbers of w that U's are multiplied with are over 2^kExponent, of matrices of codes.
template <class U, class W>
constexpr int kExponent = 0;
template <>
inline constexpr int kExponent<float, e4m3> = kHalfExponent;
template <>
inline constexpr int kExponent<lifted, e4m3> = kBitsExponent - kLift;

// Vectors of w as U's.
template <class U>
using Line = decltype(load(static_cast<const U*>(nullptr)));
template <class U, int Vectors, class W>
[[gnu::always_inline]] inline void take(const W* w, int64_t ldw, Line<U> (&line)[Vectors]) {
  if constexpr (std::is_same_v<U, pair> && kNeighbours<W> == 2) {
    zip(w, line);
  } else if constexpr (std::is_same_v<U, pair>) {
    zip(w, w + ldw, line);
  } else if constexpr (std::is_same_v<U, float>) {
    load_line(w, line);
  } else if constexpr (std::is_same_v<U, lifted> && Vectors == 4) {
    load_quads(w, line);
  } else if constexpr (std::is_same_v<U, lifted>) {
    load_bits(w, line);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) line[v] = load(w + v * kLanes);
  }
}

// The scales of a tile's columns, from its first group on, of numbers over 2^Exponent; `group` and depth count U's.
template <int Exponent>
struct Scales {
  ScaleRows rows;
  int64_t group;
};
template <int Exponent>
inline Scales<Exponent> operator+(const Scales<Exponent>& scales, int64_t cols) { return {scales.rows + cols, scales.group}; }
// Of a matrix that has none, depth is one group, whose sum continues what is in out.
struct NoScales {};
inline NoScales operator+(NoScales, int64_t) { return {}; }
inline int64_t group_end(NoScales, int64_t, int64_t depth) { return depth; }
template <int Exponent>
inline int64_t group_end(const Scales<Exponent>& scales, int64_t begin, int64_t depth) { return std::min(depth, begin + scales.group); }
inline vf first_sum(NoScales, bool fresh, const float* out) { return fresh ? vf{} : load(out); }
template <int Exponent>
inline vf first_sum(const Scales<Exponent>&, bool, const float*) { return vf{}; }
// From the group of `begin` on: divided once, and not for each vector.
inline NoScales from_group(NoScales, int64_t) { return {}; }
template <int Exponent>
inline Scales<Exponent> from_group(const Scales<Exponent>& scales, int64_t begin) { return {scales.rows.below(begin / scales.group), scales.group}; }
inline vf total(NoScales, int, bool, const float*, vf sum) { return sum; }
template <int Exponent>
inline vf total(Scales<Exponent> scales, int v, bool fresh, const float* out, vf sum) {
  return add_products(fresh ? vf{} : load(out), scales.rows.at(0, v * kLanes) * kPowerOf2<Exponent>, sum);
}

// A tile reads its columns from a panel, and prefetches rows that are read next.
template <class U>
struct Packed {
  const U* panel;
  int64_t ld;
  Prefetcher& prefetcher;
  void prefetch_next() const { prefetcher.advance(); }
  template <int Vectors>
  void take_line(int64_t d, Line<U> (&line)[Vectors]) const {
    for (int v = 0; v < Vectors; v++) line[v] = load(panel + d * ld + v * kLanes);
  }
  template <int Vectors>
  void prefetch_line(int64_t) const {}
  template <int Vectors>  // from the vector `first` on
  [[gnu::always_inline]] void take_part(int64_t d, int first, Line<U> (&line)[Vectors]) const {
    for (int v = 0; v < Vectors; v++) line[v] = load(panel + d * ld + (first + v) * kLanes);
  }
};

// Or from w itself, and fills the panel: the copy hides behind waiting for memory.
template <class U, class W>
struct Packing {
  const W* w;
  int64_t ldw;
  U* panel;
  int64_t ld;
  void prefetch_next() const {}
  template <int Vectors>
  void take_line(int64_t d, Line<U> (&line)[Vectors]) const {
    const W* from = w + d * kRowsOf<U, W> * ldw;
    for (int row = 0; row < kRowsOf<U, W>; row++) prefetch(from + (kPackAhead + row) * ldw, Vectors * kLanes);
    take<U>(from, ldw, line);
    for (int v = 0; v < Vectors; v++) store(panel + d * ld + v * kLanes, line[v]);
  }
};

// Or from w itself, whose line `ahead` is read when this one has been.
template <class U, class W>
struct Direct {
  const W* w;
  int64_t ldw, ahead;
  void prefetch_next() const {}
  template <int Vectors>
  void prefetch_line(int64_t d) const {
    const W* from = w + d * kRowsOf<U, W> * ldw + ahead;
    for (int row = 0; row < kRowsOf<U, W>; row++) prefetch<2>(from + row * ldw, Vectors * kLanes);
  }
  template <int Vectors>
  [[gnu::always_inline]] void take_part(int64_t d, int first, Line<U> (&line)[Vectors]) const {
    take<U>(w + d * kRowsOf<U, W> * ldw + first * kLanes, ldw, line);
  }
};

// Sources of which a line is multiplied by halves; and those whose lines are quads, where a tile has whole ones.
template <class Source>
constexpr bool kByHalves = false;
template <class Source>
constexpr bool kInQuads = false;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
inline constexpr bool kInQuads<Direct<lifted, e4m3>> = kLiftsRows;
template <>
inline constexpr bool kByHalves<Direct<floats, e2m1>> = true;
// A line of codes times two neighbours of a row, for each four vectors: those of the first input, then those of the second.
template <int Vectors>
[[gnu::always_inline]] inline void add_halves(const floats* x, const e2m1* line, vf (&sums)[Vectors]) {
#pragma GCC unroll 2
  for (int first = 0; first < Vectors; first += 4) {
    vf numbers[4];
    load_half<0>(line + first * kLanes, numbers);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) sums[first + v] = add_product(sums[first + v], &x->first, numbers[v]);
    load_half<1>(line + first * kLanes, numbers);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) sums[first + v] = add_product(sums[first + v], &x->second, numbers[v]);
  }
}
#endif

template <int Rows, int Vectors, class Body>
[[gnu::always_inline]] inline void each_quad(vf (&sums)[Rows][Vectors], const Body& body) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; v += 4) {
      vf quad[4] = {sums[r][v], sums[r][v + 1], sums[r][v + 2], sums[r][v + 3]};
      body(quad);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[r][v + i] = quad[i];
    }
}

// A tile of plain weights. U: float or pair; `depth` and `ldx` count them. It is much like `tile_of_codes`, and loops over groups, of which it
// has one: of what was tried to share code between the two, GCC 12 made slower code, up to twice.
template <int Rows, int Vectors, class U, class Source, class ScalesOf>
inline void tile(bool fresh, const U* x, int64_t ldx, const Source& source, const ScalesOf& scales, int64_t depth, float* out, int64_t ldo) {
  for (int64_t first = 0, last = 0; first < depth; first = last) {
    last = group_end(scales, first, depth);
    vf sums[Rows][Vectors];
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) sums[r][v] = first_sum(scales, fresh, out + r * ldo + v * kLanes);
    for (int64_t begin = first; begin < last; begin += kPrefetchEvery) {
      source.prefetch_next();
      for (int64_t d = begin, end = std::min(last, begin + kPrefetchEvery); d < end; d++) {
        Line<U> line[Vectors];
        source.take_line(d, line);
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < Vectors; v++) sums[r][v] = add_product(sums[r][v], x + r * ldx + d, line[v]);
      }
    }
    const ScalesOf own = from_group(scales, first);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        float* to = out + r * ldo + v * kLanes;
        store(to, total(own, v, fresh && first == 0, to, sums[r][v]));
      }
  }
}

// A tile of codes, U's: float, floats or pair. It is a function of its own: where GCC inlines it, sums are kept in memory.
template <int Rows, int Vectors, class U, class Source, class ScalesOf>
[[gnu::noinline]] void tile_of_codes(bool fresh, const U* x, int64_t ldx, const Source& source, const ScalesOf& scales, int64_t depth, float* out,
                                     int64_t ldo) {
  constexpr bool kQuads = kInQuads<Source> && Vectors % 4 == 0;
  constexpr int kAtOnce = kQuads ? 4 : std::min(Vectors, kTileVectors);  // vectors of a line that are in registers
  for (int64_t start = 0, last = 0; start < depth; start = last) {
    last = group_end(scales, start, depth);
    vf sums[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) sums[r][v] = first_sum(scales, fresh, out + r * ldo + v * kLanes);
    if constexpr (kQuads) each_quad(sums, [](auto& quad) { to_quads(quad); });
    for (int64_t begin = start; begin < last; begin += kPrefetchEvery) {
      source.prefetch_next();
      for (int64_t d = begin, end = std::min(last, begin + kPrefetchEvery); d < end; d++) {
        source.template prefetch_line<Vectors>(d);
        if constexpr (Rows == 1 && Vectors % 4 == 0 && kByHalves<Source>) {
          add_halves(x + d, source.w + d * source.ldw, sums[0]);
          continue;
        }
#pragma GCC unroll 8
        for (int first = 0; first < Vectors; first += kAtOnce) {
          Line<U> line[kAtOnce];
          source.take_part(d, first, line);
#pragma GCC unroll 8
          for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kAtOnce; v++) sums[r][first + v] = add_product(sums[r][first + v], x + r * ldx + d, line[v]);
        }
      }
    }
    if constexpr (kQuads) each_quad(sums, [](auto& quad) { from_quads(quad); });
    const ScalesOf own = from_group(scales, start);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) {
        float* to = out + r * ldo + v * kLanes;
        store(to, total(own, v, fresh && start == 0, to, sums[r][v]));
      }
  }
}

// The tile of a source. Without scales: of a panel of plain weights, or of codes that are decoded as they are read. With scales: of codes, from a
// panel or decoded as they are read.
template <int Rows, int Vectors, class U, class Source, class... Rest>
inline void run_tile(bool fresh, const U* x, int64_t ldx, const Source& source, NoScales, const Rest&... rest) {
  tile<Rows, Vectors>(fresh, x, ldx, source, NoScales{}, rest...);
}
template <int Rows, int Vectors, class U, class W, class... Rest>
inline void run_tile(bool fresh, const U* x, int64_t ldx, const Direct<U, W>& source, NoScales, const Rest&... rest) {
  tile_of_codes<Rows, Vectors>(fresh, x, ldx, source, NoScales{}, rest...);
}
template <int Rows, int Vectors, class U, class Source, int Exponent, class... Rest>
inline void run_tile(bool fresh, const U* x, int64_t ldx, const Source& source, const Scales<Exponent>& scales, const Rest&... rest) {
  tile_of_codes<Rows, Vectors>(fresh, x, ldx, source, scales, rest...);
}

// Fills a panel.
template <int Vectors, class U, class W>
inline void unpack(const Packing<U, W>& source, int64_t depth) {
  Line<U> line[Vectors];
  for (int64_t d = 0; d < depth; d++) source.take_line(d, line);
}

// Fills a panel, and gives the rows of the tile that was multiplied meanwhile: codes are decoded alone, in the registers of its sums.
template <int Vectors, class U, class W, class ScalesOf>
inline int64_t fill(bool fresh, const U* x, int64_t ldx, const Packing<U, W>& source, const ScalesOf& scales, int64_t depth, float* out,
                    int64_t ldo) {
  if constexpr (!std::is_same_v<ScalesOf, NoScales>) {
    unpack<Vectors>(source, depth);
    return 0;
  } else {
    tile<kTileRows, Vectors>(fresh, x, ldx, source, scales, depth, out, ldo);
    return kTileRows;
  }
}

template <int Vectors, int Most = kTileRows, class... Rest>
inline void tile_rows(int64_t rows, const Rest&... rest) {
  if constexpr (Most > 1) {
    if (rows < Most) return tile_rows<Vectors, Most - 1>(rows, rest...);
  }
  run_tile<Most, Vectors>(rest...);
}

// Rows first..rows-1 of out over one panel, in tiles that differ by one row at most; `width` is kTileVectors, 2 or 1 vectors.
template <class U, class ScalesOf>
inline void sweep(int64_t first, int64_t rows, int64_t width, bool fresh, const U* x, int64_t ldx, const U* panel, int64_t ld,
                  const ScalesOf& scales, int64_t depth, float* out, int64_t ldo, Prefetcher& prefetcher) {
  const int64_t left = rows - first, tiles = (left + kTileRows - 1) / kTileRows;
  const Packed<U> source{panel, ld, prefetcher};
  for (int64_t t = 0, r = first, end = 0; t < tiles; t++, r = end) {
    end = first + left * (t + 1) / tiles;
    const U* from = x + r * ldx;
    float* to = out + r * ldo;
    if (width == kTileVectors * kLanes) {
      tile_rows<kTileVectors>(end - r, fresh, from, ldx, source, scales, depth, to, ldo);
    } else if (width == 2 * kLanes) {
      tile_rows<2>(end - r, fresh, from, ldx, source, scales, depth, to, ldo);
    } else {
      tile_rows<1>(end - r, fresh, from, ldx, source, scales, depth, to, ldo);
    }
  }
}

// Columns of the panel that begins at c, of `whole` vectors' worth.
inline int64_t panel_width(int64_t c, int64_t full_cols) {
  return c + kTileVectors * kLanes <= full_cols ? kTileVectors * kLanes : c + 2 * kLanes <= full_cols ? 2 * kLanes : kLanes;
}

// The last columns, fewer than a vector.
template <class W>
inline void ragged_columns(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, int count, float* out,
                           int64_t ldo) {
  for (int64_t r = 0; r < rows; r++) {
    vf sums = load(out + r * ldo, count);
    for (int64_t d = 0; d < depth; d++) sums = add_product(sums, x + r * ldx + d, load(w + d * ldw, count));
    store(out + r * ldo, sums, count);
  }
}
template <class U, class W>
inline void ragged_columns(int64_t rows, const U* x, int64_t ldx, CodesOf<W> w, int64_t ldw, int64_t depth, int count, float* out, int64_t ldo) {
  const int64_t group = w.group / kNeighbours<U>;
  for (int64_t r = 0; r < rows; r++) {
    vf whole = load(out + r * ldo, count);
    for (int64_t begin = 0; begin < depth; begin += group) {
      vf sums = {};
      for (int64_t d = begin; d < std::min(depth, begin + group); d++) sums = add_product(sums, x + r * ldx + d, load(w.codes + d * ldw, count));
      whole = add_products(whole, w.scales.at(begin / group, 0, count), sums);
    }
    store(out + r * ldo, whole, count);
  }
}

// out[0..Rows-1] += x times lines of w, in registers; loops are unrolled by order, or the lines would be put on the stack.
template <int Rows, int Depth, int Vectors, class U>
[[gnu::always_inline]] inline void add_lines(const U* x, int64_t ldx, const Line<U> (&lines)[Depth][Vectors], float* out, int64_t ldo) {
  vf sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) sums[r][v] = load(out + r * ldo + v * kLanes);
#pragma GCC unroll 8
  for (int d = 0; d < Depth; d++)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) sums[r][v] = add_product(sums[r][v], x + r * ldx + d, lines[d][v]);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) store(out + r * ldo + v * kLanes, sums[r][v]);
}

// The last rows, fewer than twice Group: by halves of them.
template <int Group, int Depth, int Vectors, class U>
[[gnu::always_inline]] inline void add_rest(int64_t rows, const U* x, int64_t ldx, const Line<U> (&lines)[Depth][Vectors], float* out,
                                            int64_t ldo) {
  if (rows & Group) {
    add_lines<Group>(x, ldx, lines, out, ldo);
    x += Group * ldx, out += Group * ldo;
  }
  if constexpr (Group > 1) add_rest<Group / 2>(rows, x, ldx, lines, out, ldo);
}

// `Depth` and `ldx` count U's.
template <int Depth, int Vectors, class U, class W>
[[gnu::always_inline]] inline void stream_columns(int64_t rows, const U* x, int64_t ldx, const W* w, int64_t ldw, float* out, int64_t ldo) {
  constexpr int kRows = Depth * kRowsOf<U, W>;
  // Into the second cache, which takes more lines at once than the first: 24 GB/s a core, not 10.
#pragma GCC unroll 16
  for (int d = 0; d < kRows; d++) prefetch<2>(w + (d + std::max(kRows, kStreamAhead)) * ldw, Vectors * kLanes);
  constexpr int kSide = std::min(Vectors, kRegisters / 2 / Depth);  // as many columns at a time as half of the registers hold lines of
  constexpr int kGroup = kRegisters / 4 / kSide;  // lines and sums fill three quarters of the registers
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; v += kSide) {
    Line<U> side[Depth][kSide];
#pragma GCC unroll 8
    for (int d = 0; d < Depth; d++) take<U>(w + d * kRowsOf<U, W> * ldw + v * kLanes, ldw, side[d]);
    float* to = out + v * kLanes;
    int64_t r = 0;
    for (; r + kGroup <= rows; r += kGroup) add_lines<kGroup>(x + r * ldx, ldx, side, to + r * ldo, ldo);
    if constexpr (kGroup > 1) add_rest<kGroup / 2>(rows - r, x + r * ldx, ldx, side, to + r * ldo, ldo);
  }
}

// Side by side what one line of the cache holds; with one or two rows, half of it where vectors are short, which is faster. One row is a case of
// its own, so that the compiler knows the number.
template <int Depth, class U, class W>
inline void stream(int64_t rows, const U* x, int64_t ldx, const W* w, int64_t ldw, int64_t cols, float* out, int64_t ldo) {
  constexpr int kFew = sizeof(float) / sizeof(W), kMany = kLineBytes / (kLanes * sizeof(W));
  int64_t c = 0;
  if (rows == 1) {
    for (; c + kFew * kLanes <= cols; c += kFew * kLanes) stream_columns<Depth, kFew>(1, x, ldx, w + c, ldw, out + c, ldo);
  } else if (rows == 2 || kFew == kMany) {
    for (; c + kFew * kLanes <= cols; c += kFew * kLanes) stream_columns<Depth, kFew>(rows, x, ldx, w + c, ldw, out + c, ldo);
  } else {
    for (; c + kMany * kLanes <= cols; c += kMany * kLanes) stream_columns<Depth, kMany>(rows, x, ldx, w + c, ldw, out + c, ldo);
  }
  for (; c + kLanes <= cols; c += kLanes) stream_columns<Depth, 1>(rows, x, ldx, w + c, ldw, out + c, ldo);
}

template <class U>
inline void copy_row(const U* x, int64_t count, U* to) { std::memcpy(to, x, count * sizeof(U)); }
inline void copy_row(const float* x, int64_t count, lifted* to) { scale_to(x, kPowerOf2<kLift>, &to->number, count); }

// x in blocks of so many columns, the rows of a block one after another: rows that far apart would push one another out of the cache.
template <class T, class U>
inline void block_rows(int64_t rows, const T* x, int64_t ldx, int64_t depth, int64_t columns, U* blocks) {
  for (int64_t d = 0; d < depth; d += columns)
    for (int64_t r = 0; r < rows; r++, blocks += columns) copy_row(x + r * ldx + d, std::min(columns, depth - d), blocks);
}

// The widest piece of out that stays in the first cache.
inline int64_t stream_columns_of(int64_t rows) { return kStreamFloats / rows / 64 * 64; }

// Few rows of x, whose columns are walked in sequence.
template <class U, class W>
struct Streamed {
  int64_t rows, depth;
  const U *x, *blocks;
  int64_t ldx;
  int64_t deep() const { return depth - depth % kStreamDepth; }

  Streamed(Scratch& scratch, int64_t rows, const U* x, int64_t ldx, int64_t depth) : rows(rows), depth(depth), x(x), ldx(ldx) {
    U* to = scratch.take<U>(rows * deep());
    block_rows(rows, x, ldx, deep(), kStreamDepth, to);
    blocks = to;
  }
  // out += columns begin..end-1 of x times rows of w; begin is a multiple of kStreamDepth.
  void add(int64_t begin, int64_t end, const W* w, int64_t ldw, int64_t cols, float* out, int64_t ldo) const {
    const int64_t step = kRowsOf<U, W> * ldw;
    int64_t d = begin;
    for (; d + kStreamDepth <= end; d += kStreamDepth) stream<kStreamDepth>(rows, blocks + d * rows, kStreamDepth, w + d * step, ldw, cols, out, ldo);
    for (; d < end; d++) stream<1>(rows, x + d, ldx, w + d * step, ldw, cols, out, ldo);
  }
};

template <class U, class W>
void streamed(int64_t rows, const U* x, int64_t ldx, const W* w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  thread_local Scratch scratch;
  const Streamed<U, W> few(scratch, rows, x, ldx, depth);
  for (int64_t c = 0, width = 0; c < cols; c += width) {
    width = std::min(cols - c, stream_columns_of(rows));
    few.add(0, depth, w + c, ldw, width, out + c, ldo);
  }
}

// Rows of codes that are walked side by side, and decoded for each tile. x: `depth` columns, one row after another.
template <class U, class W, class ScalesOf>
void stream_codes(int64_t rows, bool fresh, const U* x, int64_t ldx, const W* w, int64_t ldw, const ScalesOf& scales, int64_t depth, int64_t cols,
                  float* out, int64_t ldo) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t c = 0;
  auto walk = [&](auto vectors, auto most) {  // as many columns as are whole tiles
    constexpr int kVectors = decltype(vectors)::value;
    for (; c + kVectors * kLanes <= cols; c += kVectors * kLanes) {
      const Direct<U, W> source{w + c, ldw, depth * kRowsOf<U, W> * ldw};
      const ScalesOf own = scales + c;
      for (int64_t t = 0, r = 0, end = 0; t < tiles; t++, r = end) {
        end = rows * (t + 1) / tiles;
        tile_rows<kVectors, decltype(most)::value>(end - r, fresh, x + r * ldx, ldx, source, own, depth, out + r * ldo + c, ldo);
      }
    }
  };
  if (rows == 1) walk(constant<kChains>, constant<1>);
  if (rows == 2) walk(constant<kTwoRowVectors>, constant<2>);
  walk(constant<kTileVectors>, constant<kTileRows>);
  walk(constant<1>, constant<kTileRows>);
}

// Numbers of a matrix, and the scales of its rows from d on, which counts U's.
template <class W>
inline const W* numbers(const W* w) { return w; }
template <class W>
inline const W* numbers(CodesOf<W> w) { return w.codes; }
template <class U, class W>
inline NoScales scales_from(const W*, int64_t) { return {}; }
template <class U, class W>
inline Scales<kExponent<U, W>> scales_from(CodesOf<W> w, int64_t d) {
  const int64_t group = w.group / kNeighbours<U>;
  return {w.scales.below(d / group), group};
}

// The groups of codes one after another. Those that have more rows than are walked side by side add up in scratch. U: what is multiplied; T: what x
// holds.
template <class U, class T, class W>
void stream_groups(int64_t rows, const T* x, int64_t ldx, CodesOf<W> w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  thread_local Scratch scratch, sums_scratch;
  const int64_t group = w.group / kNeighbours<U>, part = std::min(group, kCodeDepth / kRowsOf<U, W>);
  U* blocks = scratch.take<U>(rows * (depth + part));
  block_rows(rows, x, ldx, depth, part, blocks);
  for (int64_t c = 0, width = 0; c < cols; c += width) {
    width = std::min(cols - c, stream_columns_of(rows));
    const int64_t step = width + kPad;
    float* sums = sums_scratch.floats(rows * step);
    for (int64_t begin = 0; begin < depth; begin += group) {
      const auto scales = scales_from<U>(w + c, begin);
      const int64_t end = std::min(depth, begin + group);
      auto add = [&](int64_t d, const auto& by, bool fresh, float* to, int64_t ldt) {
        const W* from = w.codes + d * kRowsOf<U, W> * ldw + c;
        stream_codes(rows, fresh, blocks + d * rows, part, from, ldw, by, std::min(part, end - d), width, to, ldt);
      };
      if (part == group) {
        add(begin, scales, false, out + c, ldo);
        continue;
      }
      for (int64_t d = begin; d < end; d += part) add(d, NoScales{}, d == begin, sums, step);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i += kLanes) {
          float* to = out + r * ldo + c + i;
          store(to, total(scales + i, 0, false, to, load(sums + r * step + i)));
        }
    }
  }
}
template <class U, class W>
void streamed(int64_t rows, const U* x, int64_t ldx, CodesOf<W> w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo) {
  if constexpr (kLiftsRows && std::is_same_v<U, float> && std::is_same_v<W, e4m3>) {
    const KeepSubnormal keep;
    stream_groups<lifted>(rows, x, ldx, w, ldw, depth, cols, out, ldo);
  } else {
    stream_groups<U>(rows, x, ldx, w, ldw, depth, cols, out, ldo);
  }
}

// The product of many rows, of columns 0..whole-1, which are whole vectors. U: what is multiplied; depth, ldx: counted in it. A panel of w
// is a copy: in w itself, its rows would push one another out of the cache.
template <class U, class Matrix>
void tiled(int64_t rows, const U* x, int64_t ldx, Matrix w, int64_t ldw, int64_t depth, int64_t full_cols, float* out, int64_t ldo,
           bool fresh) {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(numbers(w))>>;
  constexpr int64_t kPanelDepth = kPanelFloats * sizeof(float) / sizeof(U);
  thread_local Scratch scratch;
  U* panel = scratch.take<U>(kPanelDepth * kTileVectors * kLanes);
  for (int64_t d = 0, deep = 0; d < depth; d += deep) {
    deep = std::min(kPanelDepth, depth - d);
    const W* from = numbers(w) + d * kRowsOf<U, W> * ldw;
    const bool anew = fresh && d == 0;
    Prefetcher prefetcher;
    for (int64_t c = 0, width = 0; c < full_cols; c += width) {
      width = panel_width(c, full_cols);
      const auto scales = scales_from<U>(w + c, d);
      const Packing<U, W> source{from + c, ldw, panel, width};
      int64_t done = 0;
      if (width == kTileVectors * kLanes) {
        done = fill<kTileVectors>(anew, x + d, ldx, source, scales, deep, out + c, ldo);
      } else if (width == 2 * kLanes) {
        done = fill<2>(anew, x + d, ldx, source, scales, deep, out + c, ldo);
      } else {
        done = fill<1>(anew, x + d, ldx, source, scales, deep, out + c, ldo);
      }
      if (c % kPrefetchColumns == 0) {
        const int64_t next = c + kPrefetchColumns, bytes = std::min(kPrefetchColumns, full_cols - next) * int64_t(sizeof(W));
        prefetcher = {reinterpret_cast<const char*>(from + next), ldw * int64_t(sizeof(W)), next < full_cols ? deep * kRowsOf<U, W> : 0, bytes};
      }
      sweep(done, rows, width, anew, x + d, ldx, panel, width, scales, deep, out + c, ldo, prefetcher);
    }
  }
}

// The product of rows with a matrix of floats that is contiguous in cache.
inline void gemm_in_cache(int64_t rows, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t depth, int64_t cols, float* out,
                             int64_t ldo, bool fresh) {
  const int64_t full_cols = cols - cols % kLanes;
  Prefetcher no_prefetch;
  for (int64_t c = 0, width = 0; c < full_cols; c += width) {
    width = panel_width(c, full_cols);
    sweep(0, rows, width, fresh, x, ldx, w + c, ldw, NoScales{}, depth, out + c, ldo, no_prefetch);
  }
  if (full_cols == cols) return;
  for (int64_t r = 0; fresh && r < rows; r++) std::fill(out + r * ldo + full_cols, out + r * ldo + cols, 0.0f);
  ragged_columns(rows, x, ldx, w + full_cols, ldw, depth, cols - full_cols, out + full_cols, ldo);
}

template <class Matrix>
inline int64_t stream_rows(const Matrix&) { return kStreamRows; }
inline int64_t stream_rows(const float*) { return kStreamFloatRows; }
inline int64_t stream_rows(const Codes& w) { return w.format == Format::kE4m3 ? kStreamE4m3Rows : kStreamCodeRows; }
template <class W>
inline int64_t stream_rows(const CodesOf<W>&) { return std::is_same_v<W, e4m3> ? kStreamE4m3Rows : kStreamCodeRows; }

// Few rows or many, of columns 0..whole-1. U: what is multiplied; depth, ldx: counted in it. Matrix: a pointer, or CodesOf.
template <class U, class Matrix>
void gemm_whole_vectors(int64_t rows, const U* x, int64_t ldx, Matrix w, int64_t ldw, int64_t depth, int64_t full_cols, float* out, int64_t ldo,
                   bool fresh) {
  if (rows > stream_rows(w)) return tiled(rows, x, ldx, w, ldw, depth, full_cols, out, ldo, fresh);
  for (int64_t r = 0; fresh && r < rows; r++) std::fill(out + r * ldo, out + r * ldo + full_cols, 0.0f);
  streamed(rows, x, ldx, w, ldw, depth, full_cols, out, ldo);
}

template <class U, class Matrix>
void gemm_all(int64_t rows, const U* x, int64_t ldx, Matrix w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo, bool fresh) {
  const int64_t full_cols = cols - cols % kLanes;
  gemm_whole_vectors(rows, x, ldx, w, ldw, depth, full_cols, out, ldo, fresh);
  if (full_cols == cols) return;
  for (int64_t r = 0; fresh && r < rows; r++) std::fill(out + r * ldo + full_cols, out + r * ldo + cols, 0.0f);
  ragged_columns(rows, x, ldx, w + full_cols, ldw, depth, cols - full_cols, out + full_cols, ldo);
}

template <class T>
void gemm(int64_t rows, const float* x, int64_t ldx, const T* w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo,
             bool fresh = false) {
  gemm_all(rows, x, ldx, w, ldw, depth, cols, out, ldo, fresh);
}
// With codes of 4 bits, depth and `ldx` are even.
inline void gemm(int64_t rows, const float* x, int64_t ldx, Codes w, int64_t ldw, int64_t depth, int64_t cols, float* out, int64_t ldo, bool fresh) {
  w.with([&](auto own) {
    using U = std::conditional_t<kNeighbours<std::remove_const_t<std::remove_pointer_t<decltype(own.codes)>>> == 2, floats, float>;
    gemm_all(rows, reinterpret_cast<const U*>(x), ldx / kNeighbours<U>, own, ldw, depth / kNeighbours<U>, cols, out, ldo, fresh);
  });
}

}  // namespace rex
