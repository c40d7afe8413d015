// New keys and values, or latent rows, into their slots of the pool, in place. A slot's rows may be wider: zeros fill them. Padding tokens
// write nothing.
#pragma once
#include "parallel.h"
#include "vec.h"

namespace rex {

constexpr int64_t kWriteTokens = 64;  // of a piece of work

struct WriteShape {
  int64_t tokens, groups, dim, pages, page, row, first_page;
};

template <class X>
struct WriteInputs {
  const X *keys, *values;  // values: null for latent rows
  const int32_t *positions, *token_rows, *page_table;
  const bool* valid;
};

template <class X, class P>
void write_row(const X* from, int64_t count, P* to, int64_t row) {
  convert(from, to, count);
  if (row > count) std::memset(static_cast<void*>(to + count), 0, (row - count) * sizeof(P));
}

template <class X, class P>
void kv_write(Team& team, const WriteShape& s, const WriteInputs<X>& in, P* cache) {
  const int64_t rows = in.values == nullptr ? 1 : 2;  // of a group
  each_block(team, s.tokens, kWriteTokens, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      if (!in.valid[n]) continue;
      const int64_t at = in.positions[n], page = s.first_page + in.page_table[in.token_rows[n] * s.pages + at / s.page];
      P* slot = cache + (page * s.page + at % s.page) * rows * s.groups * s.row;
      for (int64_t g = 0; g < s.groups; g++) {
        const int64_t from = (n * s.groups + g) * s.dim;
        write_row(in.keys + from, s.dim, slot + rows * g * s.row, s.row);
        if (in.values != nullptr) write_row(in.values + from, s.dim, slot + (rows * g + 1) * s.row, s.row);
      }
    }
  });
}

}  // namespace rex
