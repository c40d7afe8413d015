// Softmax attention over a paged pool [L*P, page, 2G, C]: row 2g of a slot holds the keys of kv head g, row 2g+1 its values. A latent
// pool is [L*P, page, 1, C]: one row is the key of all heads, and its first numbers are the value. Windows, chunks and sinks are those
// of layers/attention_features.py.
// Only slots that some query of the piece sees are read: slots of other requests, and those before a window, may be NaN or freed.
#pragma once
#include "attention_floats.h"
#include "attention_tiles.h"

namespace rex {

// Way: of the products, InFloats or InTiles.
template <class Way, class Q, class T>
void attend(const AttentionShape& s, const PagedStep& step, const QueryPiece& piece, const Q* queries, const T* pool, Q* out) {
  thread_local Mix mix;
  thread_local Way way;
  const typename Way::Mode mode;
  const int64_t share = piece.share, rows = (piece.end - piece.begin) * share, all = piece.groups * rows, value_dim = s.value_dim();
  const float scale = s.scale != 0 ? s.scale : 1.0f / std::sqrt(static_cast<float>(s.dim));
  auto token = [&](int64_t row) { return piece.begin + row % rows / share; };
  auto head = [&](int64_t row) { return (piece.group + row / rows) * s.share() + piece.head + row % share; };
  auto slot = [&](int64_t at) -> const T* {
    const int64_t listed = step.first_page + step.page_table[piece.request * s.pages + at / s.page];
    return pool + (listed * s.page + at % s.page) * s.stride() + (s.latent ? 0 : s.width(piece.group));
  };
  const Range whole{s.seen(step.positions[piece.begin]).begin, step.positions[piece.end - 1] + 1};
  mix.start(all, s.dim, value_dim);
  for (int64_t r = 0; r < all; r++) {  // rounded as PagedAttend rounds: by the scale of keys first
    const bool scaled = s.kv_scales.keys != 1.0f;
    scale_to(queries + (token(r) * s.heads + head(r)) * s.dim, scaled ? s.kv_scales.keys : scale, mix.queries + r * s.dim, s.dim);
    if (scaled) scale_to(mix.queries + r * s.dim, scale, mix.queries + r * s.dim, s.dim);
  }
  way.prepare(s, mix, piece.groups, rows);
  for (int64_t r = 0; s.sinks != nullptr && r < all; r++) mix.top[r] = s.sinks[head(r)], mix.total[r] = 1.0f;  // a weight without a value
  for (int64_t start = whole.begin / kKeys * kKeys; start < whole.end; start += kKeys) {
    const Range keys = whole.within(start, kKeys);
    const T* slots[kKeys];
    for (int64_t t = keys.begin; t < keys.end; t++) slots[t] = slot(start + t);
    for (int64_t t = keys.first_lane(); t < keys.begin; t++) slots[t] = slots[keys.begin];
    auto sees = [&](int64_t row) { return s.seen(step.positions[token(row)]).within(start, kKeys); };
    if (rows > kFewRows) {
      way.lay(s, mix, keys, slots);
      way.mix_many(s, mix, rows, sees, slots);
      continue;
    }
    way.score_few(s, mix, piece.groups, rows, keys, slots);
    for (int64_t r = 0; r < all; r++) mix.template weigh<typename Way::Weight>(r, keys.first_lane(), keys.last_lane(), sees(r), value_dim);
    way.blend_few(s, mix, piece.groups, rows, share, sees, slots);
  }
  for (int64_t r = 0; r < all; r++) {
    const float factor = 1.0f / std::max(mix.total[r], 1e-30f);
    const bool scaled = s.kv_scales.values != 1.0f;
    float* mixed = mix.mixed + r * value_dim;
    if (scaled) scale_to(mixed, factor, mixed, value_dim);
    scale_to(mixed, scaled ? s.kv_scales.values : factor, out + (token(r) * s.heads + head(r)) * value_dim, value_dim);
  }
}

template <class Q, class T>
void attention(Team& team, const AttentionShape& s, const PagedStep& step, const Q* queries, const T* cache, Q* out) {
  const int64_t num_fed = s.requests ? step.query_starts[s.requests] : 0;
  const int64_t width = s.heads * s.value_dim();
  std::memset(static_cast<void*>(out + num_fed * width), 0, (s.tokens - num_fed) * width * sizeof(Q));  // padding
  const std::vector<QueryPiece> pieces = query_pieces(s, step, team.size());
  team.each(pieces.size(), [&](int64_t i) {
    if constexpr (std::is_same_v<T, bf16>) {
      if (InTiles::fits(s)) return attend<InTiles>(s, step, pieces[i], queries, cache, out);
    }
    attend<InFloats>(s, step, pieces[i], queries, cache, out);
  });
}

}  // namespace rex
