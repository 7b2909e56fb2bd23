// Products with a weight kept in FP4 and packed: codes [n / 16, k / 8, 16] of eight inputs of an output each, the first
// in the lowest bits, and scales [n / 16, k / 32, 16].
//
// A product of an e2m1 and a power of two is exact in bf16, and sums are made in the order of packed.h: results have
// the very bits that the same weight gives as bf16, from a quarter of the memory.
#pragma once

#include "fp4.h"
#include "packed.h"

namespace headrace {

#ifdef HEADRACE_AVX512_BF16

constexpr int64_t kFp4Inputs = 8;   // of one output in a word
constexpr int64_t kPanelTiles = 4;  // column tiles that are unpacked together

using Panel = std::vector<bf16, CacheAligned<bf16>>;

struct Fp4Tiles {
  const uint32_t* codes;  // [tiles, k / 8, 16]
  const uint8_t* scales;  // [tiles, k / 32, 16]
  int64_t k;

  Fp4Tiles from(int64_t tile) const {
    return {codes + tile * k / kFp4Inputs * kTileColumns, scales + tile * k / kFp4Row * kTileColumns, k};
  }
  // Inputs [input, input + 8) of 16 outputs.
  __m512i word(int64_t tile, int64_t input) const {
    return _mm512_loadu_si512(codes + (tile * k + input) / kFp4Inputs * kTileColumns);
  }
  // The scales of inputs [input, input + 32).
  __m512 scale(int64_t tile, int64_t input) const {
    const uint8_t* bytes = scales + (tile * k + input) / kFp4Row * kTileColumns;
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i bits = _mm512_slli_epi32(wide, 23);
    return _mm512_castsi512_ps(
        _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(wide, wide), _mm512_set1_epi32(0x00400000)));
  }
};

// The first input of each word. Only the lowest four bits of an index count.
inline __m512 fp4_values(__m512i word, __m512 scale) {
  return _mm512_mul_ps(_mm512_permutexvar_ps(word, _mm512_load_ps(kFp4)), scale);
}

// The first two inputs of each word, as bf16.
inline __m512i fp4_pairs(__m512i word, __m512 scale) {
  const __m512i even = _mm512_castps_si512(fp4_values(word, scale));
  const __m512i odd = _mm512_castps_si512(fp4_values(_mm512_srli_epi32(word, 4), scale));
  return _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xaaaaaaaau, odd);
}

// Calls use(first input of 8, words, scales) for C tiles from the first input to the last of [start, end).
template <int C, class Use>
inline void each_word(const Fp4Tiles& tiles, int64_t start, int64_t end, Use use) {
  for (int64_t group = start; group < end; group += kFp4Row) {
    __m512 scale[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) scale[c] = tiles.scale(c, group);
    for (int64_t input = group; input < group + kFp4Row; input += kFp4Inputs) {
      __m512i word[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) word[c] = tiles.word(c, input);
      use(input, word, scale);
    }
  }
}

// sums[m][c] = x[m] times column tile c, as dot_product_tile.
template <int M, int C>
inline void fp4_dot_product_tile(const bf16* const* x, const Fp4Tiles& tiles, __m512 sums[M][C]) {
  each_word<C>(tiles, 0, tiles.k, [&](int64_t input, __m512i* word, const __m512* scale) {
    for (int64_t i = input; i < input + kFp4Inputs; i += 2) {
      __m512bh w[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) w[c] = (__m512bh)fp4_pairs(word[c], scale[c]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) word[c] = _mm512_srli_epi32(word[c], 8);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, x[m] + i, sizeof pair);
        const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[m][c] = _mm512_dpbf16_ps(sums[m][c], w[c], inputs);
      }
    }
  });
}

// The same as widened_tile: numbers become fp32 at once.
template <int M, int C>
inline void fp4_widened_tile(const bf16* const* x, const Fp4Tiles& tiles, __m512 sums[M][C]) {
  static_assert(kDepth % kFp4Row == 0, "scales of whole groups");
  alignas(64) float inputs[M][kDepth];
  for (int64_t start = 0; start < tiles.k; start += kDepth) {
    const int64_t depth = std::min(kDepth, tiles.k - start);
    for (int m = 0; m < M; ++m) widen(x[m] + start, depth, inputs[m]);
    each_word<C>(tiles, start, start + depth, [&](int64_t input, __m512i* word, const __m512* scale) {
#pragma GCC unroll 8
      for (int i = 0; i < kFp4Inputs; ++i)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const __m512 w = fp4_values(word[c], scale[c]);
          word[c] = _mm512_srli_epi32(word[c], 4);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m)
            sums[m][c] = _mm512_fmadd_ps(w, _mm512_set1_ps(inputs[m][input - start + i]), sums[m][c]);
        }
    });
  }
}

// emit(row, first column of 16, their values) for M rows and C tiles, with numbers looked up in registers on the way.
template <bool kWidens, int M, int C, class Emit>
inline void fp4_fused_tiles(const bf16* const* x, const Fp4Tiles& tiles, int64_t column, Emit& emit) {
  __m512 sums[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[m][c] = _mm512_setzero_ps();
  if constexpr (kWidens)
    fp4_widened_tile<M, C>(x, tiles, sums);
  else
    fp4_dot_product_tile<M, C>(x, tiles, sums);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) emit(m, column + c * kTileColumns, sums[m][c]);
}

template <bool kWidens, int M, class Emit>
inline void fp4_fused(const bf16* const* x, const Fp4Tiles& weight, int64_t num_tiles, Emit& emit) {
  int64_t tile = 0;
  for (; tile + kPanelTiles <= num_tiles; tile += kPanelTiles)
    fp4_fused_tiles<kWidens, M, kPanelTiles>(x, weight.from(tile), tile * kTileColumns, emit);
  for (; tile < num_tiles; ++tile)
    fp4_fused_tiles<kWidens, M, 1>(x, weight.from(tile), tile * kTileColumns, emit);
}

// Unpacks a panel at a time into `scratch` (bf16, as packed.h has it), where it stays in the cache for all rows.
template <bool kWidens, class Emit>
inline void fp4_panels(const bf16* const* x, int64_t num_rows, const Fp4Tiles& weight, int64_t num_tiles,
                       Panel& scratch, Emit& emit) {
  scratch.resize(kPanelTiles * kTileColumns * weight.k);
  for (int64_t first = 0; first < num_tiles; first += kPanelTiles) {
    const int64_t num = std::min(kPanelTiles, num_tiles - first);
    const Fp4Tiles panel = weight.from(first);
    for (int64_t tile = 0; tile < num; ++tile) {
      bf16* out = scratch.data() + tile * weight.k * kTileColumns;
      each_word<1>(panel.from(tile), 0, weight.k, [&](int64_t input, __m512i* word, const __m512* scale) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kFp4Inputs; i += 2) {
          _mm512_store_si512(out + (input + i) * kTileColumns, fp4_pairs(word[0], scale[0]));
          word[0] = _mm512_srli_epi32(word[0], 8);
        }
      });
    }
    auto shifted = [&](int64_t row, int64_t column, __m512 values) {
      emit(row, first * kTileColumns + column, values);
    };
    multiply_panels<kWidens>(x, num_rows, scratch.data(), weight.k, 0, num * kTileColumns, shifted);
  }
}

template <bool kWidens, class Emit>
inline void multiply_fp4(const bf16* const* x, int64_t num_rows, const Fp4Tiles& weight, int64_t num_tiles,
                         Panel& scratch, Emit& emit) {
  switch (num_rows) {
    case 0: return;
    case 1: return fp4_fused<kWidens, 1>(x, weight, num_tiles, emit);
    case 2: return fp4_fused<kWidens, 2>(x, weight, num_tiles, emit);
    case 3: return fp4_fused<kWidens, 3>(x, weight, num_tiles, emit);
    case 4: return fp4_fused<kWidens, 4>(x, weight, num_tiles, emit);
    default: return fp4_panels<kWidens>(x, num_rows, weight, num_tiles, scratch, emit);  // once for all rows
  }
}

// emit(row, first column of 16, their values) for all tiles of a weight.
template <class Emit>
inline void multiply_packed_fp4(const bf16* const* x, int64_t num_rows, const Fp4Tiles& weight, int64_t num_tiles,
                                Panel& scratch, Emit emit) {
  if (widens())
    multiply_fp4<true>(x, num_rows, weight, num_tiles, scratch, emit);
  else
    multiply_fp4<false>(x, num_rows, weight, num_tiles, scratch, emit);
}

#endif

}  // namespace headrace
