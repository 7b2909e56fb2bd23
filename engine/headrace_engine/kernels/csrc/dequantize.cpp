// Weights from a checkpoint's FP4 and FP8 to the model's dtype: once, when they are loaded.
#include "fp4.h"

namespace headrace {

// 16 bytes of two e2m1 each, the low half first -> 32 numbers, through a table of the 16 values times the scale.
template <class T>
inline void fp4_group(const uint8_t* packed, float scale, T* out) {
  T table[16];
  for (int code = 0; code < 16; ++code) store(&table[code], kFp4[code] * scale);
  for (int64_t i = 0; i < kFp4Row / 2; ++i) {
    out[2 * i] = table[packed[i] & 15];
    out[2 * i + 1] = table[packed[i] >> 4];
  }
}

#ifdef HEADRACE_AVX512
// The whole table fits into a register: one permutation looks all 32 up.
template <>
inline void fp4_group<bf16>(const uint8_t* packed, float scale, bf16* out) {
  alignas(32) bf16 table[16];
  for (int code = 0; code < 16; ++code) store(&table[code], kFp4[code] * scale);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  const __m512i codes = _mm512_or_si512(_mm512_and_si512(bytes, _mm512_set1_epi32(15)),
                                        _mm512_slli_epi32(_mm512_srli_epi32(bytes, 4), 16));
  const __m512i values = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes, values));
}
#endif

// packed [rows, columns / 2], scales [rows, columns / 32] -> out [rows, columns].
template <class T>
void fp4(const uint8_t* packed, const float* scales, int64_t rows, int64_t columns, T* out) {
  const int64_t groups = rows * (columns / kFp4Row);
  for (int64_t group = 0; group < groups; ++group)
    fp4_group(packed + group * (kFp4Row / 2), scales[group], out + group * kFp4Row);
}

// Without branches or a table, so that loops over it are vectorised. 2^-6 is the smallest normal number: one below it is
// read as if it were normal, 1 + mantissa / 8 times 2^-6, and loses the 1.
inline float e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const bool is_small = magnitude < 8;
  const uint32_t bits = (magnitude << 20) + ((is_small ? 121u : 120u) << 23);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  value -= is_small ? 0x1p-6f : 0.0f;
  uint32_t result;
  std::memcpy(&result, &value, sizeof result);
  result = (magnitude == 0x7fu ? 0x7fc00000u : result) | (code & 0x80u) << 24;
  std::memcpy(&value, &result, sizeof value);
  return value;
}

// codes [rows, columns], scales [rows / block_rows, columns / block_columns], both rounded up -> out [rows, columns].
template <class T>
void fp8(const uint8_t* codes, const float* scales, int64_t rows, int64_t columns, int64_t block_rows,
         int64_t block_columns, T* out) {
  const int64_t blocks = (columns + block_columns - 1) / block_columns;
  for (int64_t row = 0; row < rows; ++row) {
    const float* row_scales = scales + row / block_rows * blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t end = std::min(columns, (block + 1) * block_columns);
      const float scale = row_scales[block];
#pragma omp simd
      for (int64_t i = row * columns + block * block_columns; i < row * columns + end; ++i)
        store(out + i, e4m3(codes[i]) * scale);
    }
  }
}

}  // namespace headrace

HEADRACE_API void headrace_fp4(int is_bf16, const uint8_t* packed, const float* scales, int64_t rows, int64_t columns,
                               void* out) {
  using namespace headrace;
  if (is_bf16)
    fp4(packed, scales, rows, columns, static_cast<bf16*>(out));
  else
    fp4(packed, scales, rows, columns, static_cast<float*>(out));
}

HEADRACE_API void headrace_fp8(int is_bf16, const uint8_t* codes, const float* scales, int64_t rows, int64_t columns,
                               int64_t block_rows, int64_t block_columns, void* out) {
  using namespace headrace;
  if (is_bf16)
    fp8(codes, scales, rows, columns, block_rows, block_columns, static_cast<bf16*>(out));
  else
    fp8(codes, scales, rows, columns, block_rows, block_columns, static_cast<float*>(out));
}
