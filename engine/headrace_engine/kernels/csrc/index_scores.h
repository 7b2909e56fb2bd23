// Scores of the lightning indexer: score(t, g) = sum_h weight[t, h] * relu(q[t, h] . key[g]).
//
// Keys are read in place, by block table. With AVX-512, 48 keys at a time are widened to fp32 and transposed, so that a
// register's lanes are keys and no sum across lanes is needed (fp32 and not bf16 products: see key_products.h).
#pragma once

#include "batch.h"
#include "dot_tile.h"

namespace headrace {

constexpr int64_t kQueries = 16;  // queries of one sequence that share a transposed tile of keys

template <class T>
struct Indexer {
  Batch batch;
  Pages<const T> keys;
  const T* q;            // [tokens, heads, dim]
  const float* weights;  // [tokens, heads]
  int64_t heads, dim, ratio;

  // How many entries token t of sequence s sees.
  int64_t visible(int64_t s, int64_t t) const { return (batch.position(s, t) + 1) / ratio; }
};

struct Scratch {  // one thread's
  Floats scores, queries, tile, best;
  std::vector<uint32_t> keys, rest;
  std::vector<int32_t> numbers;
};

#ifdef HEADRACE_AVX512
constexpr int kTileKeys = 48;
constexpr int64_t kHeads = 8;  // heads whose sums are in registers together

// Lane j of out[i] is lane i of x[j].
inline void transpose16(const __m512i x[16], __m512i out[16]) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {  // fours[4 * i + j]: lanes j, 4 + j, 8 + j, 12 + j of x[4 * i ..], 128 bits each
    const __m512i a = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    out[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    out[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    out[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    out[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// keys [16] from dim k on -> rows k .. of a tile [dim, 48]: as many dims as a register holds.
inline void transpose_block(const float* const* keys, int64_t k, float* tile) {
  __m512i x[16], y[16];
  for (int j = 0; j < 16; ++j) x[j] = _mm512_loadu_si512(keys[j] + k);
  transpose16(x, y);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + (k + i) * kTileKeys, y[i]);
}

inline void transpose_block(const bf16* const* keys, int64_t k, float* tile) {
  __m512i x[16], y[16];
  for (int j = 0; j < 16; ++j) x[j] = _mm512_loadu_si512(keys[j] + k);
  transpose16(x, y);
  for (int i = 0; i < 16; ++i) {  // pairs of dims: shifted up the even one, the rest masked off the odd one
    _mm512_store_si512(tile + (k + 2 * i) * kTileKeys, _mm512_slli_epi32(y[i], 16));
    _mm512_store_si512(tile + (k + 2 * i + 1) * kTileKeys,
                       _mm512_and_si512(y[i], _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }
}

// keys [48] of `dim` -> tile [dim, 48].
template <class T>
inline void transpose_tile(const T* const* keys, int64_t dim, float* tile) {
  constexpr int64_t kDims = 64 / sizeof(T);
  int64_t k = 0;
  for (; k + kDims <= dim; k += kDims)
    for (int j = 0; j < kTileKeys; j += 16) transpose_block(keys + j, k, tile + j);
  for (; k < dim; ++k)
    for (int j = 0; j < kTileKeys; ++j) tile[k * kTileKeys + j] = to_float(keys[j][k]);
}

// q [heads, dim] -> [heads / 8, dim, 8], one stream for a loop over dims; what is left of the heads as it is.
template <class T>
inline void interleave_heads(const T* q, int64_t heads, int64_t dim, float* out) {
  int64_t head = 0;
  for (; head + kHeads <= heads; head += kHeads)
    for (int64_t k = 0; k < dim; ++k)
      for (int64_t h = 0; h < kHeads; ++h) out[head * dim + k * kHeads + h] = to_float(q[(head + h) * dim + k]);
  widen(q + head * dim, (heads - head) * dim, out + head * dim);
}

// scores[48] += sum over H heads of weight * relu(q[h] . key), q [dim, H]. Not inlined: its 24 sums leave no register
// to spare.
template <int H>
__attribute__((noinline)) void add_scores(const float* q, const float* weights, const float* tile, int64_t dim,
                                          float* scores) {
  __m512 dots[H][3];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) dots[h][0] = dots[h][1] = dots[h][2] = _mm512_setzero_ps();
  for (int64_t k = 0; k < dim; ++k) {
    const __m512 a = _mm512_load_ps(tile + k * kTileKeys), b = _mm512_load_ps(tile + k * kTileKeys + 16),
                 c = _mm512_load_ps(tile + k * kTileKeys + 32);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const __m512 x = _mm512_set1_ps(q[k * H + h]);
      dots[h][0] = _mm512_fmadd_ps(a, x, dots[h][0]);
      dots[h][1] = _mm512_fmadd_ps(b, x, dots[h][1]);
      dots[h][2] = _mm512_fmadd_ps(c, x, dots[h][2]);
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    __m512 sum = _mm512_loadu_ps(scores + 16 * j);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
      sum = _mm512_fmadd_ps(_mm512_max_ps(dots[h][j], _mm512_setzero_ps()), _mm512_set1_ps(weights[h]), sum);
    _mm512_storeu_ps(scores + 16 * j, sum);
  }
}

// scores[48] of one query, its heads interleaved.
inline void score_tile(const float* q, const float* weights, int64_t heads, int64_t dim, const float* tile,
                       float* scores) {
  std::fill(scores, scores + kTileKeys, 0.0f);
  int64_t head = 0;
  for (; head + kHeads <= heads; head += kHeads) add_scores<kHeads>(q + head * dim, weights + head, tile, dim, scores);
  for (; head < heads; ++head) add_scores<1>(q + head * dim, weights + head, tile, dim, scores);
}

// scratch.scores [queries, stride] of queries [t, end) of sequence s against `num` of its entries: the first ones, or
// those of the given numbers; stride >= num + 47.
template <class T>
void score(const Indexer<T>& x, int64_t s, int64_t t, int64_t end, const int32_t* numbers, int64_t num, int64_t stride,
           Scratch& scratch) {
  const int64_t query_size = x.heads * x.dim;
  scratch.queries.resize(kQueries * query_size);
  scratch.tile.resize(x.dim * kTileKeys);
  for (int64_t i = 0; i < end - t; ++i)
    interleave_heads(x.q + (t + i) * query_size, x.heads, x.dim, scratch.queries.data() + i * query_size);
  const T* keys[kTileKeys];
  for (int64_t start = 0; start < num; start += kTileKeys) {
    for (int j = 0; j < kTileKeys; ++j) {
      const int64_t column = std::min(start + j, num - 1);
      keys[j] = x.keys.entry(x.batch.block_tables + s * x.batch.max_blocks, numbers ? numbers[column] : column);
    }
    transpose_tile(keys, x.dim, scratch.tile.data());
    for (int64_t i = 0; i < end - t; ++i)
      score_tile(scratch.queries.data() + i * query_size, x.weights + (t + i) * x.heads, x.heads, x.dim,
                 scratch.tile.data(), scratch.scores.data() + i * stride + start);
  }
}
#else
constexpr int kTileKeys = 1;

template <class T>
void score(const Indexer<T>& x, int64_t s, int64_t t, int64_t end, const int32_t* numbers, int64_t num, int64_t stride,
           Scratch& scratch) {
  const int32_t* blocks = x.batch.block_tables + s * x.batch.max_blocks;
  for (int64_t query = t; query < end; ++query)
    for (int64_t g = 0; g < num; ++g) {
      const T* key = x.keys.entry(blocks, numbers ? numbers[g] : g);
      float sum = 0.0f;
      multiply_rows<T, 1>(&key, x.q + query * x.heads * x.dim, x.dim, 0, x.heads, [&](int, int64_t h, float value) {
        sum += std::max(value, 0.0f) * x.weights[query * x.heads + h];
      });
      scratch.scores[(query - t) * stride + g] = sum;
    }
}
#endif

}  // namespace headrace
