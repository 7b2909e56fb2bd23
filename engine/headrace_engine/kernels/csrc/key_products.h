// The two products of attention for up to 8 heads of one query: with its keys, and of the powers with the same rows.
//
// bf16 keys are widened in registers, once for all heads, and multiplied in fp32: on Intel's cores two fp32 FMAs start
// every cycle and one bf16 dot product every other, which is half the multiplications. Keys that many queries share are
// better made integers once (fixed_point.h): FixedProducts.
#pragma once

#include "dot_tile.h"
#include "fixed_point.h"

namespace headrace {

constexpr int kTile = 32;  // keys

struct HeadBlock {  // running softmax of H <= 8 heads of one query
  float top[8], sum[8], factor[8];
  alignas(64) float powers[kTile * 8];  // [keys, H]: lanes of a register are 16 / H keys of H heads
  Floats queries;  // [heads, padded dim] where they are widened (see set_queries)
  FixedRows fixed_queries;
  Floats values;   // [heads, padded dim], in the order that add_values leaves within each block of 32
};

inline int64_t padded(int64_t dim) { return (dim + 31) / 32 * 32; }

// The general case: fp32, and any dtype without AVX-512.
template <class T>
struct Products {
  using Row = T;

  static void set_queries(const T* const*, int, int64_t, HeadBlock&) {}

  // b.powers[i, h] = q[h] . keys[i], 16 at a time: 16 / H keys and H heads, the last of them perhaps padding.
  template <int H>
  static void dot(const T* const* q, const T* const* keys, int num, int64_t dim, HeadBlock& b) {
    for (int i = 0; i < num; i += 16 / H) dot_tile<T, 16 / H, H>(keys + i, q, dim, b.powers + i * H);
  }

  // values[h] = values[h] * factor[h] + sum over keys of power * key.
  template <int H>
  static void add_values(const T* const* keys, int num, int64_t dim, HeadBlock& b) {
    for (int h = 0; h < H; ++h) {
      float* values = b.values.data() + h * padded(dim);
#pragma omp simd
      for (int64_t k = 0; k < dim; ++k) values[k] *= b.factor[h];
    }
    for (int i = 0; i < num; ++i)
      for (int h = 0; h < H; ++h) {
        const float power = b.powers[i * H + h];
        float* values = b.values.data() + h * padded(dim);
#pragma omp simd
        for (int64_t k = 0; k < dim; ++k) values[k] += power * to_float(keys[i][k]);
      }
  }

  static void restore_order(float*, int64_t) {}
};

#ifdef HEADRACE_AVX512
// 32 bf16 are 16 pairs: shifting left gives the even ones as fp32, masking gives the odd ones. Queries and values are
// kept in that order, 16 even dims and then 16 odd ones, so that nothing needs to be shuffled.
template <>
struct Products<bf16> {
  using Row = bf16;

  struct Pairs {
    __m512 even, odd;
  };

  static Pairs split(__m512i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
  }

  // Dims k .. k + 32 of x, zeros beyond dim.
  static Pairs load(const bf16* x, int64_t k, int64_t dim) {
    if (k + 32 <= dim) return split(_mm512_loadu_si512(x + k));
    return split(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << (dim - k)) - 1), x + k));
  }

  static void set_queries(const bf16* const* q, int heads, int64_t dim, HeadBlock& b) {
    for (int h = 0; h < heads; ++h)
      for (int64_t k = 0; k < dim; k += 32) {
        const Pairs x = load(q[h], k, dim);
        float* to = b.queries.data() + h * padded(dim) + k;
        _mm512_storeu_ps(to, x.even);
        _mm512_storeu_ps(to + 16, x.odd);
      }
  }

  template <int H>
  static void dot(const bf16* const*, const bf16* const* keys, int num, int64_t dim, HeadBlock& b) {
    for (int i = 0; i < num; i += 16 / H) dot_register<H>(keys + i, dim, b, b.powers + i * H);
  }

  template <int H>
  static void dot_register(const bf16* const* keys, int64_t dim, const HeadBlock& b, float* logits) {
    constexpr int kKeys = 16 / H;
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < dim; k += 32)
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; j += 2) {
        const Pairs x = load(keys[j], k, dim), y = load(keys[j + 1], k, dim);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
          const float* q = b.queries.data() + h * padded(dim) + k;
          const __m512 even = _mm512_loadu_ps(q), odd = _mm512_loadu_ps(q + 16);
          __m512 &to_x = sums[j * H + h], &to_y = sums[(j + 1) * H + h];
          to_x = _mm512_fmadd_ps(x.even, even, to_x);
          to_y = _mm512_fmadd_ps(y.even, even, to_y);
          to_x = _mm512_fmadd_ps(x.odd, odd, to_x);
          to_y = _mm512_fmadd_ps(y.odd, odd, to_y);
        }
      }
    _mm512_storeu_ps(logits, sum_each(sums));
  }

  template <int H>
  static void add_values(const bf16* const* keys, int num, int64_t dim, HeadBlock& b) {
    for (int64_t k = 0; k < dim; k += 32) {
      __m512 even[H], odd[H];
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) {
        const float* values = b.values.data() + h * padded(dim) + k;
        const __m512 factor = _mm512_set1_ps(b.factor[h]);
        even[h] = _mm512_mul_ps(_mm512_loadu_ps(values), factor);
        odd[h] = _mm512_mul_ps(_mm512_loadu_ps(values + 16), factor);
      }
      for (int i = 0; i < num; ++i) {
        const Pairs key = load(keys[i], k, dim);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
          const __m512 power = _mm512_set1_ps(b.powers[i * H + h]);
          even[h] = _mm512_fmadd_ps(key.even, power, even[h]);
          odd[h] = _mm512_fmadd_ps(key.odd, power, odd[h]);
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) {
        float* values = b.values.data() + h * padded(dim) + k;
        _mm512_storeu_ps(values, even[h]);
        _mm512_storeu_ps(values + 16, odd[h]);
      }
    }
  }

  static void restore_order(float* values, int64_t dim) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    for (int64_t k = 0; k < dim; k += 32) {
      const __m512 even = _mm512_loadu_ps(values + k), odd = _mm512_loadu_ps(values + k + 16);
      _mm512_storeu_ps(values + k, _mm512_permutex2var_ps(even, first, odd));
      _mm512_storeu_ps(values + k + 16, _mm512_permutex2var_ps(even, second, odd));
    }
  }
};
#endif

#ifdef HEADRACE_AVX512_VNNI
struct FixedProducts {
  using Row = int16_t;  // of FixedRows

  static void set_queries(const bf16* const* q, int heads, int64_t dim, HeadBlock& b) {
    b.fixed_queries.resize(heads, dim);
    for (int h = 0; h < heads; ++h) b.fixed_queries.set(h, q[h], dim);
  }

  template <int H>
  static void dot(const bf16* const*, const int16_t* const* keys, int num, int64_t dim, HeadBlock& b) {
    for (int i = 0; i < num; i += 16 / H) dot_register<H>(keys + i, dim, b.fixed_queries, b.powers + i * H);
    float scales[H];
    for (int h = 0; h < H; ++h) scales[h] = FixedRows::scale(b.fixed_queries.row(h));
    for (int i = 0; i < num; ++i) {
      const float scale = FixedRows::scale(keys[i]);
#pragma omp simd
      for (int h = 0; h < H; ++h) b.powers[i * H + h] *= scale * scales[h];
    }
  }

  // Not inlined, nor is `add_block`: their sums need most registers.
  template <int H>
  __attribute__((noinline)) static void dot_register(const int16_t* const* keys, int64_t dim, const FixedRows& queries,
                                                     float* logits) {
    constexpr int kKeys = 16 / H;
    Int32s sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = Int32s{};
    const int16_t* q = queries.row(0);
    const int64_t stride = queries.stride();
    for (int64_t k = 0; k < dim; k += 32)
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; j += 2) {
        const __m512i x = _mm512_load_si512(keys[j] + k), y = _mm512_load_si512(keys[j + 1] + k);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
          const __m512i numbers = _mm512_load_si512(q + h * stride + k);
          sums[j * H + h] = add_pairs(sums[j * H + h], x, numbers);
          sums[(j + 1) * H + h] = add_pairs(sums[(j + 1) * H + h], y, numbers);
        }
      }
    __m512 wide[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) wide[i] = _mm512_cvtepi32_ps((__m512i)sums[i]);
    _mm512_storeu_ps(logits, sum_each(wide));
  }

  // Powers times their keys' scales become integers too, of which a head's add up to 2^15 at most in a tile: no sum of
  // products with integers below 2^15 overflows.
  template <int H>
  static void add_values(const int16_t* const* keys, int num, int64_t dim, HeadBlock& b) {
    float sums[H] = {}, factors[H], scales[H];
    for (int i = 0; i < num; ++i) {
      const float scale = FixedRows::scale(keys[i]);
#pragma omp simd
      for (int h = 0; h < H; ++h) sums[h] += b.powers[i * H + h] *= scale;
    }
    for (int h = 0; h < H; ++h) {
      factors[h] = sums[h] == 0.0f ? 0.0f : kLargest / sums[h];
      scales[h] = sums[h] / kLargest;
    }
    alignas(64) int32_t pairs[kTile / 2 * H];  // powers of two keys each
    for (int i = 0; i < num; i += 2)
#pragma omp simd
      for (int h = 0; h < H; ++h) {
        const int32_t low = static_cast<int32_t>(b.powers[i * H + h] * factors[h] + 0.5f);
        const int32_t high = static_cast<int32_t>(b.powers[(i + 1) * H + h] * factors[h] + 0.5f);
        pairs[i / 2 * H + h] = low | high << 16;
      }
    for (int64_t k = 0; k < dim; k += 32)
      add_block<H>(keys, num, k, pairs, b.factor, scales, b.values.data() + k, padded(dim));
  }

  template <int H>
  __attribute__((noinline)) static void add_block(const int16_t* const* keys, int num, int64_t k, const int32_t* pairs,
                                                  const float* factors, const float* scales, float* values,
                                                  int64_t stride) {
    Int32s low[H], high[H];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) low[h] = high[h] = Int32s{};
    for (int i = 0; i < num; i += 2) {
      const __m512i x = _mm512_load_si512(keys[i] + k), y = _mm512_load_si512(keys[i + 1] + k);
      const __m512i lows = _mm512_unpacklo_epi16(x, y), highs = _mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) {
        const __m512i powers = _mm512_set1_epi32(pairs[i / 2 * H + h]);
        low[h] = add_pairs(low[h], lows, powers);
        high[h] = add_pairs(high[h], highs, powers);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const __m512 factor = _mm512_set1_ps(factors[h]), scale = _mm512_set1_ps(scales[h]);
      float* to = values + h * stride;
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)low[h]), scale);
      const __m512 more = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)high[h]), scale);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, sum));
      _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), factor, more));
    }
  }

  // Interleaving two keys' numbers leaves, of each 8 dims, the first 4 in `low` and the others in `high`.
  static void restore_order(float* values, int64_t dim) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int64_t k = 0; k < dim; k += 32) {
      const __m512 low = _mm512_loadu_ps(values + k), high = _mm512_loadu_ps(values + k + 16);
      _mm512_storeu_ps(values + k, _mm512_permutex2var_ps(low, first, high));
      _mm512_storeu_ps(values + k + 16, _mm512_permutex2var_ps(low, second, high));
    }
  }
};
#endif

}  // namespace headrace
