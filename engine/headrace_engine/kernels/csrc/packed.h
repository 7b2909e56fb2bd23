// Products with a packed weight: [n / 16, k / 2, 16, 2] in place of [n, k], so that a register holds the same two
// inputs of 16 outputs. One dot product instruction then serves 16 outputs, and no sum across lanes is needed.
#pragma once

#include "common.h"

namespace headrace {

#ifdef HEADRACE_AVX512_BF16

constexpr int64_t kTileColumns = 16;

// sums[m][c] = x[m] times column tile c, for M rows and C tiles of k inputs each.
template <int M, int C>
inline void packed_tile(const bf16* const* x, const bf16* tiles, int64_t k, __m512 sums[M][C]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[m][c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2) {
    __m512bh w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) w[c] = (__m512bh)_mm512_loadu_si512(tiles + (c * k + i) * kTileColumns);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x[m] + i, sizeof pair);
      const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[m][c] = _mm512_dpbf16_ps(sums[m][c], w[c], inputs);
    }
  }
}

// emit(row, first column of 16, their values) for `num_rows` rows of x, in blocks of M and what is left, and C tiles.
template <int M, int C, class Emit>
inline void packed_rows(const bf16* const* x, int64_t first, int64_t num_rows, const bf16* tiles, int64_t k,
                        int64_t column, Emit& emit) {
  for (; first + M <= num_rows; first += M) {
    __m512 sums[M][C];
    packed_tile<M, C>(x + first, tiles, k, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) emit(first + m, column + c * kTileColumns, sums[m][c]);
  }
  if constexpr (M > 1) {
    if (first < num_rows) packed_rows<(M > 4 ? 4 : M / 2), C>(x, first, num_rows, tiles, k, column, emit);
  }
}

// Rows times columns [first, last) of a packed weight; first and last are multiples of 16. A panel of 64 columns stays
// in the first cache while all rows use it. One or two rows take wider panels: enough sums in flight to hide latency.
template <class Emit>
inline void multiply_packed(const bf16* const* x, int64_t num_rows, const bf16* weight, int64_t k, int64_t first,
                            int64_t last, Emit emit) {
  int64_t column = first;
  const auto tiles = [&] { return weight + column * k; };
  if (num_rows <= 2)
    for (; column + 8 * kTileColumns <= last; column += 8 * kTileColumns)
      packed_rows<2, 8>(x, 0, num_rows, tiles(), k, column, emit);
  for (; column + 4 * kTileColumns <= last; column += 4 * kTileColumns)
    packed_rows<6, 4>(x, 0, num_rows, tiles(), k, column, emit);
  for (; column < last; column += kTileColumns) packed_rows<6, 1>(x, 0, num_rows, tiles(), k, column, emit);
}

inline void store16(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store16(bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

#endif

}  // namespace headrace
