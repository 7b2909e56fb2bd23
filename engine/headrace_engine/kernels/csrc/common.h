// What all kernels share: the bf16 type, its conversions, exp, and norm and rotation of one row.
//
// Everything is written twice at most: portable C++ that the compiler vectorises for the target, and AVX-512
// intrinsics where that is not enough (dot_tile.h, packed.h, fixed_point.h, key_products.h, index_scores.h, sinkhorn4,
// narrow).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HEADRACE_AVX512 1
#include <immintrin.h>
#endif
#if defined(HEADRACE_AVX512) && defined(__AVX512BF16__)
#define HEADRACE_AVX512_BF16 1
#endif
#if defined(HEADRACE_AVX512) && defined(__AVX512VNNI__)
#define HEADRACE_AVX512_VNNI 1
#endif

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

namespace headrace {

// Memory that starts with a cache line: a register loaded across two lines costs two loads.
template <class T>
struct CacheAligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  CacheAligned() = default;
  template <class U>
  CacheAligned(const CacheAligned<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* x, size_t) { ::operator delete(x, kLine); }
  bool operator==(const CacheAligned&) const { return true; }
  bool operator!=(const CacheAligned&) const { return false; }
};

using Floats = std::vector<float, CacheAligned<float>>;

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float* to, float x) { *to = x; }

// Round to nearest even; a NaN stays a NaN. No branches, so that loops over it are vectorised.
inline void store(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// x as the model's dtype would hold it: where the reference rounds an intermediate value, so do the kernels.
template <class T>
inline float rounded(float x) {
  T held;
  store(&held, x);
  return to_float(held);
}

// exp(x) to about 2 ulp for x <= 88; 0 below -87. Cody-Waite reduction and a polynomial: it vectorises, libm's does not.
inline float fast_exp(float x) {
  const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent << 23) + 0x3f800000u;
  float power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

inline float inverse_rms(const float* x, int64_t n, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

template <class T>
inline void widen(const T* x, int64_t n, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i]);
}

template <class T>
inline void narrow(const float* x, int64_t n, T* out) {
  int64_t first = 0;
#ifdef HEADRACE_AVX512_BF16
  if constexpr (std::is_same_v<T, bf16>)
    for (; first + 16 <= n; first += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + first),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + first)));
#endif
#pragma omp simd
  for (int64_t i = first; i < n; ++i) store(out + i, x[i]);
}

// x <- x / rms(x) * weight, in fp32; weight may be null. Rounded to T, as a norm that stands alone would be.
template <class T>
inline void norm_row(float* x, const float* weight, int64_t n, float eps) {
  const float factor = inverse_rms(x, n, eps);
  if (weight) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = rounded<T>(x[i] * factor * weight[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = rounded<T>(x[i] * factor);
  }
}

// Turns the last 2 * half of n dims, adjacent pairs as complex numbers, by the angle of cos and sin (sign -1: back).
inline void rotate_row(float* x, int64_t n, const float* cos, const float* sin, int64_t half, float sign) {
  float* pairs = x + n - 2 * half;
  for (int64_t k = 0; k < half; ++k) {
    const float real = pairs[2 * k], imaginary = pairs[2 * k + 1], turn = sign * sin[k];
    pairs[2 * k] = real * cos[k] - imaginary * turn;
    pairs[2 * k + 1] = real * turn + imaginary * cos[k];
  }
}

}  // namespace headrace
