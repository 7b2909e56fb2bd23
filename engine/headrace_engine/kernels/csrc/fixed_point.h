// Rows of bf16 numbers as 16-bit integers with one scale each, for dot products in whole numbers.
//
// Intel's cores start two products of 32 pairs of such integers every cycle, but two of 16 fp32 numbers: twice the
// multiplications. Sums are exact. A row's length (norm) in integers is at most sqrt(2^31), so that no sum can overflow:
// |a . b| <= |a| |b| <= 2^31 (Cauchy-Schwarz), and a sum of some of the products likewise. What rounding to integers loses
// is 2^-16 of the row's length in each dot product, a tenth of what rounding the row to bf16 had lost before.
#pragma once

#include "common.h"

namespace headrace {

#ifdef HEADRACE_AVX512_VNNI

constexpr float kLongest = 46340.0f;  // the square root of 2^31
constexpr float kLargest = 32767.0f;

// Sums, of this type and not __m512i: arrays of it GCC 12 keeps in registers, arrays of the other it also stores.
using Int32s = int32_t __attribute__((vector_size(64)));

// Lane by lane, two products are added.
inline Int32s add_pairs(Int32s sum, __m512i a, __m512i b) {
  return (Int32s)_mm512_dpwssd_epi32((__m512i)sum, a, b);
}

// The fp32 numbers of 16 pairs of bf16: a shift gives the even ones, a mask the odd ones.
inline __m512 even_numbers(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_numbers(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// Numbers [first, first + 32) of x [n], zeros beyond n.
inline __m512i load32(const bf16* x, int64_t first, int64_t n) {
  if (first + 32 <= n) return _mm512_loadu_si512(x + first);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << (n - first)) - 1), x + first);
}

// x [n] -> out [n rounded up to 32], zeros at the end, with x = scale * out; the scale is returned, NaN if x has one.
inline float to_fixed(const bf16* x, int64_t n, int16_t* out) {
  __m512 squares = _mm512_setzero_ps(), more = squares;
  __m512i largest = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i pairs = load32(x, i, n);
    squares = _mm512_fmadd_ps(even_numbers(pairs), even_numbers(pairs), squares);
    more = _mm512_fmadd_ps(odd_numbers(pairs), odd_numbers(pairs), more);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs, magnitude));  // as bits, bf16 sort as integers do
  }
  const float length = std::sqrt(_mm512_reduce_add_ps(_mm512_add_ps(squares, more)));
  const float top = _mm512_reduce_max_ps(_mm512_max_ps(even_numbers(largest), odd_numbers(largest)));
  if (length == 0.0f) {
    std::memset(out, 0, sizeof *out * ((n + 31) / 32 * 32));
    return 0.0f;
  }
  // Rounding makes a row longer by at most half of sqrt(n); the other half is for the fp32 sum of squares.
  const float factor = std::min((kLongest - std::sqrt(static_cast<float>(n))) / length, kLargest / top);
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i pairs = load32(x, i, n);
    const __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps(even_numbers(pairs), factors));
    const __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps(odd_numbers(pairs), factors));
    _mm512_storeu_si512(out + i, _mm512_mask_blend_epi16(0xaaaaaaaau, even, _mm512_slli_epi32(odd, 16)));
  }
  return 1.0f / factor;
}

#endif

// Rows of integers, each after a cache line that holds its scale; whole lines, zeros at the end.
class FixedRows {
 public:
  void resize(int64_t num, int64_t dim) {
    stride_ = (dim + kLine - 1) / kLine * kLine + kLine;
    numbers_.resize(num * stride_);
  }
  bool empty() const { return numbers_.empty(); }
  int64_t stride() const { return stride_; }
  const int16_t* row(int64_t i) const { return numbers_.data() + i * stride_ + kLine; }
  static float scale(const int16_t* row) {
    float scale;
    std::memcpy(&scale, row - kLine, sizeof scale);
    return scale;
  }
#ifdef HEADRACE_AVX512_VNNI
  void set(int64_t i, const bf16* x, int64_t dim) {
    int16_t* line = numbers_.data() + i * stride_;
    const float scale = to_fixed(x, dim, line + kLine);
    std::memcpy(line, &scale, sizeof scale);
  }
#endif

 private:
  static constexpr int64_t kLine = 32;
  std::vector<int16_t, CacheAligned<int16_t>> numbers_;
  int64_t stride_ = 0;
};

}  // namespace headrace
