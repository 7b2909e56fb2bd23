// dot_tile: the dot products of a few rows with a few other rows, the heart of every product with few rows.
//
// Rows are contiguous along the summed dimension, as weights [out, in] and cached keys are, so nothing is repacked.
// bf16 uses the dot-product instruction where the target has it; sums are fp32 always.
#pragma once

#include "common.h"

namespace headrace {

#ifdef HEADRACE_AVX512

inline __mmask16 first16(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int kWidth = 16;
  using Vector = __m512;
  static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  static Vector load_first(const float* x, int64_t n) { return _mm512_maskz_loadu_ps(first16(n), x); }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

#ifdef HEADRACE_AVX512_BF16
template <>
struct Lanes<bf16> {
  static constexpr int kWidth = 32;
  using Vector = __m512bh;
  static Vector load(const bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static Vector load_first(const bf16* x, int64_t n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), x);
  }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#else
template <>
struct Lanes<bf16> {
  static constexpr int kWidth = 16;
  using Vector = __m512;
  static Vector widen16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static Vector load(const bf16* x) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  static Vector load_first(const bf16* x, int64_t n) { return widen16(_mm256_maskz_loadu_epi16(first16(n), x)); }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};
#endif

// Lane i of the result is the sum of x[i]'s lanes: a tree of interleaved additions, 45 instructions for 16 sums.
inline __m512 sum_each(__m512 x[16]) {
  __m512 y[8], z[4], w[2];
  for (int i = 0; i < 8; ++i)
    y[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i)
    w[i] = _mm512_add_ps(_mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xdd));
}

// out[a * NB + b] = dot(as[a], bs[b]) over n elements. NA * NB must be 16.
template <class T, int NA, int NB>
inline void dot_tile(const T* const* as, const T* const* bs, int64_t n, float* out) {
  static_assert(NA * NB == 16, "one register of results");
  using L = Lanes<T>;
  __m512 sums[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + L::kWidth <= n; k += L::kWidth) {
    typename L::Vector a[NA];
#pragma GCC unroll 16
    for (int i = 0; i < NA; ++i) a[i] = L::load(as[i] + k);
#pragma GCC unroll 16
    for (int j = 0; j < NB; ++j) {
      const typename L::Vector b = L::load(bs[j] + k);
#pragma GCC unroll 16
      for (int i = 0; i < NA; ++i) sums[i * NB + j] = L::multiply_add(sums[i * NB + j], a[i], b);
    }
  }
  if (k < n) {
    typename L::Vector a[NA];
#pragma GCC unroll 16
    for (int i = 0; i < NA; ++i) a[i] = L::load_first(as[i] + k, n - k);
#pragma GCC unroll 16
    for (int j = 0; j < NB; ++j) {
      const typename L::Vector b = L::load_first(bs[j] + k, n - k);
#pragma GCC unroll 16
      for (int i = 0; i < NA; ++i) sums[i * NB + j] = L::multiply_add(sums[i * NB + j], a[i], b);
    }
  }
  _mm512_storeu_ps(out, sum_each(sums));
}

#else  // portable

template <class T, int NA, int NB>
inline void dot_tile(const T* const* as, const T* const* bs, int64_t n, float* out) {
  for (int i = 0; i < NA; ++i)
    for (int j = 0; j < NB; ++j) {
      const T *a = as[i], *b = bs[j];
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < n; ++k) sum += to_float(a[k]) * to_float(b[k]);
      out[i * NB + j] = sum;
    }
}

#endif

// One tile of NA rows of x with columns [first, last) of weight [., k] row-major: emit(row, column, value).
template <class T, int NA, class Emit>
inline void multiply_rows(const T* const* x, const T* weight, int64_t k, int64_t first, int64_t last, Emit emit) {
  constexpr int kColumns = 16 / NA;
  for (int64_t column = first; column < last; column += kColumns) {
    const T* rows[kColumns];
    for (int j = 0; j < kColumns; ++j) rows[j] = weight + std::min(column + j, last - 1) * k;
    float sums[16];
    dot_tile<T, NA, kColumns>(x, rows, k, sums);
    const int num = static_cast<int>(std::min<int64_t>(kColumns, last - column));
    for (int i = 0; i < NA; ++i)
      for (int j = 0; j < num; ++j) emit(i, column + j, sums[i * kColumns + j]);
  }
}

// The same for any number of rows, in tiles of 4, 2 and 1, so that a weight is read once per 4 rows.
template <class T, class Emit>
inline void multiply(const T* const* x, int64_t num_rows, const T* weight, int64_t k, int64_t first, int64_t last,
                     Emit emit) {
  int64_t row = 0;
  const auto shifted = [&](int64_t by) {
    return [&emit, by](int i, int64_t column, float value) { emit(by + i, column, value); };
  };
  for (; row + 4 <= num_rows; row += 4) multiply_rows<T, 4>(x + row, weight, k, first, last, shifted(row));
  if (row + 2 <= num_rows) multiply_rows<T, 2>(x + row, weight, k, first, last, shifted(row)), row += 2;
  if (row < num_rows) multiply_rows<T, 1>(x + row, weight, k, first, last, shifted(row));
}

}  // namespace headrace
