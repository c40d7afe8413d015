// The handlers of attention over the pool: check shapes and dtypes, then attend, or write new rows.
#pragma once
#include "attention.h"
#include "handlers.h"
#include "kv_write.h"
#include "latent_attention.h"

namespace rex {

constexpr char kOutsideStep[] = "query_starts or positions are outside the step or its page table, or a page outside the pool";
constexpr char kOutsidePool[] = "a position is outside the page table, or a page outside the pool";

// Whether the tokens of each request are tokens of the step, at positions that its page table has, and all pages that they see are pages
// first_page.. of a pool that has `pool_pages`. Pages before a window may be any.
inline bool inside(const AttentionShape& s, const PagedStep& step, int64_t pool_pages) {
  for (int64_t b = 0; b < s.requests; b++) {
    const int64_t begin = step.query_starts[b], end = step.query_starts[b + 1];
    if (begin < 0 || end < begin || end > s.tokens) return false;
    if (begin == end) continue;
    const int64_t first = step.positions[begin], last = step.positions[end - 1];
    if (first < 0 || last < first || last >= s.pages * s.page) return false;
    for (int64_t p = s.seen(first).begin / s.page; p <= last / s.page; p++) {
      const int64_t page = step.first_page + step.page_table[b * s.pages + p];
      if (page < 0 || page >= pool_pages) return false;
    }
  }
  return true;
}

// Whether each token that is written has a slot: positions and requests of the page table, pages of the pool, which has `pool_pages`.
inline bool writable(ffi::Buffer<ffi::S32>& positions, ffi::Buffer<ffi::S32>& token_rows, ffi::Buffer<ffi::PRED>& valid,
                     ffi::Buffer<ffi::S32>& page_table, int64_t page, int64_t first_page, int64_t pool_pages) {
  const auto table = page_table.dimensions();
  for (int64_t n = 0, tokens = valid.element_count(); n < tokens; n++) {
    const int64_t position = positions.typed_data()[n], row = token_rows.typed_data()[n];
    if (!valid.typed_data()[n]) continue;
    if (position < 0 || position >= table[1] * page || row < 0 || row >= table[0]) return false;
    const int64_t written = first_page + page_table.typed_data()[row * table[1] + position / page];
    if (written < 0 || written >= pool_pages) return false;
  }
  return true;
}

// `sinks` [H], or [0] for none; `latent`, `window`, `chunk`, `scale`: 0 for none.
ffi::Error run_attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> first_page,
                         ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> page_table,
                         ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out, int64_t latent, int64_t window, int64_t chunk,
                         float scale) {
  const auto q = queries.dimensions(), kv = cache.dimensions(), table = page_table.dimensions();
  const int64_t num_sinks = sinks.element_count();
  const AttentionShape shape{q[0],   q[1],   latent ? 1 : kv[2] / 2, q[2],  table[0], table[1], kv[1], kv[3],
                             latent, window, chunk,                  scale, num_sinks ? sinks.typed_data() : nullptr};
  const PagedStep step{positions.typed_data(), query_starts.typed_data(), page_table.typed_data(), first_page.typed_data()[0]};
  if (out->element_type() != queries.element_type() || kv[3] < q[2] || int64_t(positions.element_count()) != q[0] ||
      int64_t(query_starts.element_count()) != table[0] + 1)
    return mismatch("queries and their result have one dtype; positions are [N], query_starts [B + 1]");
  if ((num_sinks != 0 && num_sinks != q[1]) || out->dimensions()[2] != shape.value_dim() || shape.groups < 1 || shape.heads % shape.groups != 0)
    return mismatch("sinks are [H], results [N, H, V], and kv heads divide heads");
  if (latent < 0 || latent > q[2] || window < 0 || chunk < 0 || (latent && kv[2] != 1))
    return ffi::Error::InvalidArgument("windows and chunks are not negative, and values of a latent row are its first numbers");
  if (!inside(shape, step, kv[0])) return ffi::Error::InvalidArgument(kOutsideStep);
  Team team(pool);
  return dispatch_dtype(queries.element_type(), [&](auto query) {
    using Q = decltype(query);
    return dispatch_pool(cache.element_type(), [&](auto stored) {
      using T = decltype(stored);
      attention(team, shape, step, at<Q>(queries), at<T>(cache), at<Q>(out));
      return ffi::Error::Success();
    });
  });
}

// Rows [N, X, C] into slots of X rows, `cache` being returned as `written`, the same memory: keys and `values` alternate, or there are no
// values ([0]) and keys are latent rows.
ffi::Error run_kv_write(ffi::ThreadPool pool, ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer cache,
                        ffi::Buffer<ffi::S32> first_page, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows,
                        ffi::Buffer<ffi::PRED> valid, ffi::Buffer<ffi::S32> page_table, ffi::Result<ffi::AnyBuffer> written) {
  const auto rows = keys.dimensions(), kv = cache.dimensions(), table = page_table.dimensions();
  const bool both = values.element_count() != 0 || kv[2] != rows[1];
  const WriteShape shape{rows[0], rows[1], rows[2], table[1], kv[1], kv[3], first_page.typed_data()[0]};
  if (cache.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the KV pool was copied");
  if (values.element_type() != keys.element_type() || (both && values.element_count() != keys.element_count()) ||
      kv[2] != (both ? 2 : 1) * rows[1] || kv[3] < rows[2] || int64_t(positions.element_count()) != rows[0] ||
      int64_t(token_rows.element_count()) != rows[0] || int64_t(valid.element_count()) != rows[0])
    return mismatch("keys and values are [N, G, C] of one dtype and a slot has a row for each of them");
  if (!writable(positions, token_rows, valid, page_table, kv[1], first_page.typed_data()[0], kv[0])) return ffi::Error::InvalidArgument(kOutsidePool);
  Team team(pool);
  return dispatch_dtype(keys.element_type(), [&](auto type) {
    using X = decltype(type);
    const WriteInputs<X> inputs{at<X>(keys), both ? at<X>(values) : nullptr, positions.typed_data(), token_rows.typed_data(),
                                page_table.typed_data(), valid.typed_data()};
    return dispatch_pool(cache.element_type(), [&](auto stored) {
      kv_write(team, shape, inputs, at<decltype(stored)>(written));
      return ffi::Error::Success();
    });
  });
}

// `cache` is returned as `written`, the same memory.
ffi::Error run_latent_attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer compressed, ffi::AnyBuffer norm,
                                ffi::AnyBuffer up, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, ffi::AnyBuffer cache,
                                ffi::Buffer<ffi::S32> first_page, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows,
                                ffi::Buffer<ffi::PRED> valid, ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> page_table,
                                ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> written, bool interleaved, float scale, float eps) {
  const auto q = queries.dimensions(), rows = compressed.dimensions(), kv = cache.dimensions(), table = page_table.dimensions();
  const int64_t rank = norm.element_count(), rotary = rows[1] - rank, value_dim = out->dimensions()[2];
  const LatentShape shape{q[0],     q[1],  rank,  q[2] - rotary, value_dim, rotary, table[1], kv[1], kv[3], first_page.typed_data()[0],
                          interleaved, eps};
  const AttentionShape attention_shape{q[0], q[1], 1, shape.width(), table[0], table[1], kv[1], kv[3], rank, 0, 0, scale, nullptr};
  const PagedStep step{positions.typed_data(), query_starts.typed_data(), page_table.typed_data(), first_page.typed_data()[0]};
  if (cache.untyped_data() != written->untyped_data()) return ffi::Error::Internal("the KV pool was copied");
  if (compressed.element_type() != queries.element_type() || out->element_type() != queries.element_type() || norm.element_type() != up.element_type())
    return mismatch("queries, compressed rows and the result have one dtype, and the norm of rows and the matrix");
  if (rotary < 0 || rotary % 2 != 0 || shape.key_dim < 1 || rows[0] != q[0] || up.dimensions()[0] != rank || up.dimensions()[1] != shape.up() ||
      kv[2] != 1 || kv[3] < shape.width() || int64_t(cos.element_count()) != q[0] * rotary / 2 || sin.element_count() != cos.element_count() ||
      int64_t(positions.element_count()) != q[0] || int64_t(token_rows.element_count()) != q[0] || int64_t(valid.element_count()) != q[0] ||
      int64_t(query_starts.element_count()) != table[0] + 1)
    return mismatch("queries are [N, H, K + P], rows [N, R + P], the matrix [R, H (K + V)] and angles [N, P / 2]");
  if (!inside(attention_shape, step, kv[0])) return ffi::Error::InvalidArgument(kOutsideStep);
  if (!writable(positions, token_rows, valid, page_table, kv[1], first_page.typed_data()[0], kv[0])) return ffi::Error::InvalidArgument(kOutsidePool);
  Team team(pool);
  return dispatch_rows(queries.element_type(), up.element_type(), [&](auto row, auto type) {
    using X = decltype(row);
    using T = decltype(type);
    const LatentInputs<X, T> inputs{at<X>(queries), at<X>(compressed), at<T>(norm), at<T>(up), cos.typed_data(), sin.typed_data(),
                                    positions.typed_data(), token_rows.typed_data(), page_table.typed_data(), valid.typed_data()};
    return dispatch_dtype(cache.element_type(), [&](auto stored) {
      LentScratch scratch;
      latent_attention(team, shape, attention_shape, step, inputs, *scratch.operator->(), at<decltype(stored)>(written), at<X>(out));
      return ffi::Error::Success();
    });
  });
}

}  // namespace rex
