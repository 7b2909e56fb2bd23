// Products with a packed weight: [n / 16, k / 2, 16, 2] in place of [n, k], so that a register holds the same two
// inputs of 16 outputs. Every output has a lane of its own, and no sum across lanes is needed.
#pragma once

#include "common.h"

namespace headrace {

#ifdef HEADRACE_AVX512_BF16

constexpr int64_t kTileColumns = 16;

constexpr int64_t kDepth = 512;  // inputs that are widened at a time: with their panel they stay in the second cache

// Whether to widen bf16 and use fp32 FMAs rather than the bf16 dot product. Intel's cores start two FMAs a cycle but one
// dot product every other cycle, half the multiplications (measured: 179 and 88 GFLOP/s a core); AMD's start one of
// either a cycle. Decided by vendor and not by a stopwatch: the two differ in the last bits.
inline bool widens() {
  static const bool is_intel = __builtin_cpu_is("intel") != 0;
  return is_intel;
}

// sums[m][c] = x[m] times column tile c, for M rows and C tiles of k inputs each.
template <int M, int C>
inline void dot_product_tile(const bf16* const* x, const bf16* tiles, int64_t k, __m512 sums[M][C]) {
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

// The same in fp32. All even inputs come before all odd ones, so that additions to one sum are far apart.
template <int M, int C>
inline void widened_tile(const bf16* const* x, const bf16* tiles, int64_t k, __m512 sums[M][C]) {
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  alignas(64) float inputs[M][kDepth];
  for (int64_t start = 0; start < k; start += kDepth) {
    const int64_t depth = std::min(kDepth, k - start);
    for (int m = 0; m < M; ++m) widen(x[m] + start, depth, inputs[m]);
    for (int64_t i = 0; i < depth; i += 2) {
      __m512i w[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) w[c] = _mm512_loadu_si512(tiles + (c * k + start + i) * kTileColumns);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
          sums[m][c] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w[c], 16)), _mm512_set1_ps(inputs[m][i]),
                                       sums[m][c]);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
          sums[m][c] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w[c], high)),
                                       _mm512_set1_ps(inputs[m][i + 1]), sums[m][c]);
    }
  }
}

// emit(row, first column of 16, their values) for `num_rows` rows of x, in blocks of M and what is left, and C tiles.
template <bool kWidens, int M, int C, class Emit>
inline void packed_rows(const bf16* const* x, int64_t first, int64_t num_rows, const bf16* tiles, int64_t k,
                        int64_t column, Emit& emit) {
  for (; first + M <= num_rows; first += M) {
    __m512 sums[M][C];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[m][c] = _mm512_setzero_ps();
    if constexpr (kWidens)
      widened_tile<M, C>(x + first, tiles, k, sums);
    else
      dot_product_tile<M, C>(x + first, tiles, k, sums);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) emit(first + m, column + c * kTileColumns, sums[m][c]);
  }
  if constexpr (M > 1) {
    if (first < num_rows) packed_rows<kWidens, (M > 4 ? 4 : M / 2), C>(x, first, num_rows, tiles, k, column, emit);
  }
}

// Rows times columns [first, last) of a packed weight; first and last are multiples of 16. A panel of 64 columns stays
// in the first cache while all rows use it. One or two rows take wider panels: enough sums in flight to hide latency.
template <bool kWidens, class Emit>
inline void multiply_panels(const bf16* const* x, int64_t num_rows, const bf16* weight, int64_t k, int64_t first,
                            int64_t last, Emit& emit) {
  int64_t column = first;
  const auto tiles = [&] { return weight + column * k; };
  if (num_rows <= 2)
    for (; column + 8 * kTileColumns <= last; column += 8 * kTileColumns)
      packed_rows<kWidens, 2, 8>(x, 0, num_rows, tiles(), k, column, emit);
  for (; column + 4 * kTileColumns <= last; column += 4 * kTileColumns)
    packed_rows<kWidens, 6, 4>(x, 0, num_rows, tiles(), k, column, emit);
  for (; column < last; column += kTileColumns)
    packed_rows<kWidens, 6, 1>(x, 0, num_rows, tiles(), k, column, emit);
}

template <class Emit>
inline void multiply_packed(const bf16* const* x, int64_t num_rows, const bf16* weight, int64_t k, int64_t first,
                            int64_t last, Emit emit) {
  if (widens())
    multiply_panels<true>(x, num_rows, weight, k, first, last, emit);
  else
    multiply_panels<false>(x, num_rows, weight, k, first, last, emit);
}

inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
inline __m512 times(__m512 x, float factor) { return _mm512_mul_ps(x, _mm512_set1_ps(factor)); }

#endif

inline float times(float x, float factor) { return x * factor; }

}  // namespace headrace
