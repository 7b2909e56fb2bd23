// Weights from rows to tiles of 16 rows, as packed.h and packed_fp4.h read them: once, when they are loaded.
#include "common.h"

namespace headrace {

constexpr int64_t kLanes = 16;

// out[i * 16 + lane] = rows[lane * stride + i] for i < num.
inline void transpose(const uint32_t* rows, int64_t stride, int64_t num, uint32_t* out) {
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t i = 0; i < num; ++i) out[i * kLanes + lane] = rows[lane * stride + i];
}

#ifdef HEADRACE_AVX512
// The same for num = 16: four rounds of exchanges between registers, of 1, 2, 4 and 8 words.
inline void transpose16(const uint32_t* rows, int64_t stride, uint32_t* out) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  // a[4 * q + c] has columns c, c + 4, c + 8, c + 12 of rows 4 * q to 4 * q + 3, one column to 128 bits.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(out + c * kLanes, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(out + (c + 4) * kLanes, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_storeu_si512(out + (c + 8) * kLanes, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_storeu_si512(out + (c + 12) * kLanes, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
}
#endif

}  // namespace headrace

// Words of 4 bytes (two bf16, or eight FP4): rows [tiles, 16, depth] -> tiles [tiles, depth, 16].
HEADRACE_API void headrace_pack(const uint32_t* rows, int64_t tiles, int64_t depth, uint32_t* out) {
  using namespace headrace;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const uint32_t* from = rows + tile * kLanes * depth;
    uint32_t* to = out + tile * kLanes * depth;
    int64_t first = 0;
#ifdef HEADRACE_AVX512
    for (; first + 16 <= depth; first += 16) transpose16(from + first, depth, to + first * kLanes);
#endif
    for (; first < depth; first += kLanes)  // a square of 16 stays in the first cache
      transpose(from + first, depth, std::min(kLanes, depth - first), to + first * kLanes);
  }
}

// Bytes: rows [tiles, 16, depth] -> tiles [tiles, depth, 16].
HEADRACE_API void headrace_pack_bytes(const uint8_t* rows, int64_t tiles, int64_t depth, uint8_t* out) {
  using namespace headrace;
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t i = 0; i < depth; ++i)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        out[(tile * depth + i) * kLanes + lane] = rows[(tile * kLanes + lane) * depth + i];
}
