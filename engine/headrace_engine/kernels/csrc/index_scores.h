// Scores of the lightning indexer: score(t, g) = sum_h weight[t, h] * relu(q[t, h] . key[g]).
//
// Keys are read in place, by block table. With AVX-512, 48 keys at a time are transposed, so that a register's lanes are
// keys and no sum across lanes is needed: as fp32 numbers, or bf16 as 16-bit integers where these multiply faster.
#pragma once

#include "batch.h"
#include "dot_tile.h"
#include "fixed_point.h"

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
  Floats scores, query_weights, best;
  std::vector<uint32_t, CacheAligned<uint32_t>> queries, rows, tile;  // lanes, see below
  std::vector<uint32_t> keys, rest;
  std::vector<int32_t> numbers;
};

#ifdef HEADRACE_AVX512
constexpr int kTileKeys = 48;
constexpr int64_t kHeads = 8;   // heads whose sums are in registers together
constexpr int64_t kLanes = 16;  // 32-bit lanes of a register

// How rows are multiplied: a lane is an fp32 number.
template <class T>
struct Multiplied {
  using Sum = __m512;
  static int64_t lanes(int64_t dim) { return dim; }
  static float prepare(const T* row, int64_t dim, uint32_t* out) {  // returns what products are too small by
    widen(row, dim, reinterpret_cast<float*>(out));
    return 1.0f;
  }
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum multiply_add(Sum sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static __m512 value(Sum sum) { return sum; }
};

#ifdef HEADRACE_AVX512_VNNI
// A lane is two integers, the products of both with another two are added.
template <>
struct Multiplied<bf16> {
  using Sum = Int32s;
  static int64_t lanes(int64_t dim) { return (dim + 1) / 2; }
  static float prepare(const bf16* row, int64_t dim, uint32_t* out) {
    return to_fixed(row, dim, reinterpret_cast<int16_t*>(out));
  }
  static Sum zero() { return Sum{}; }
  static Sum multiply_add(Sum sum, __m512i a, __m512i b) { return add_pairs(sum, a, b); }
  static __m512 value(Sum sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
};
#endif

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

// rows [48, stride] -> tile [stride, 48]; stride is a multiple of 16.
inline void transpose_tile(const uint32_t* rows, int64_t stride, uint32_t* tile) {
  for (int64_t k = 0; k < stride; k += kLanes)
    for (int j = 0; j < kTileKeys; j += kLanes) {
      __m512i x[16], y[16];
      for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(rows + (j + i) * stride + k);
      transpose16(x, y);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + (k + i) * kTileKeys + j, y[i]);
    }
}

// rows [heads, stride] -> [heads / 8, lanes, 8], one stream for a loop over lanes; what is left of the heads as it is.
inline void interleave_heads(const uint32_t* rows, int64_t heads, int64_t lanes, int64_t stride, uint32_t* out) {
  int64_t head = 0;
  for (; head + kHeads <= heads; head += kHeads)
    for (int64_t k = 0; k < lanes; ++k)
      for (int64_t h = 0; h < kHeads; ++h) *out++ = rows[(head + h) * stride + k];
  for (; head < heads; ++head) out = std::copy_n(rows + head * stride, lanes, out);
}

// scores[48] += sum over H heads of weight * relu(q[h] . key), q [lanes, H]. Not inlined: its 24 sums leave no register
// to spare.
template <class M, int H>
__attribute__((noinline)) void add_scores(const uint32_t* q, const float* weights, const uint32_t* tile, int64_t lanes,
                                          float* scores) {
  typename M::Sum dots[H][3];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) dots[h][0] = dots[h][1] = dots[h][2] = M::zero();
  for (int64_t k = 0; k < lanes; ++k) {
    const __m512i a = _mm512_load_si512(tile + k * kTileKeys), b = _mm512_load_si512(tile + k * kTileKeys + 16),
                  c = _mm512_load_si512(tile + k * kTileKeys + 32);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const __m512i x = _mm512_set1_epi32(static_cast<int32_t>(q[k * H + h]));
      dots[h][0] = M::multiply_add(dots[h][0], a, x);
      dots[h][1] = M::multiply_add(dots[h][1], b, x);
      dots[h][2] = M::multiply_add(dots[h][2], c, x);
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    __m512 sum = _mm512_loadu_ps(scores + 16 * j);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
      sum = _mm512_fmadd_ps(_mm512_max_ps(M::value(dots[h][j]), _mm512_setzero_ps()), _mm512_set1_ps(weights[h]), sum);
    _mm512_storeu_ps(scores + 16 * j, sum);
  }
}

// scores[48] of one query, its heads interleaved.
template <class M>
inline void score_tile(const uint32_t* q, const float* weights, int64_t heads, int64_t lanes, const uint32_t* tile,
                       const float* scales, float* scores) {
  std::fill(scores, scores + kTileKeys, 0.0f);
  int64_t head = 0;
  for (; head + kHeads <= heads; head += kHeads)
    add_scores<M, kHeads>(q + head * lanes, weights + head, tile, lanes, scores);
  for (; head < heads; ++head) add_scores<M, 1>(q + head * lanes, weights + head, tile, lanes, scores);
  for (int j = 0; j < kTileKeys; ++j) scores[j] *= scales[j];
}

// Queries [t, end) and the weights of their heads, as score_tile reads them.
template <class M, class T>
void prepare_queries(const Indexer<T>& x, int64_t t, int64_t end, int64_t lanes, int64_t stride, Scratch& scratch) {
  scratch.queries.resize(kQueries * x.heads * lanes);
  scratch.query_weights.resize(kQueries * x.heads);
  scratch.rows.resize(std::max<int64_t>(x.heads, kTileKeys) * stride);
  for (int64_t i = 0; i < end - t; ++i) {
    for (int64_t h = 0; h < x.heads; ++h) {
      const int64_t row = (t + i) * x.heads + h;
      const float scale = M::prepare(x.q + row * x.dim, x.dim, scratch.rows.data() + h * stride);
      scratch.query_weights[i * x.heads + h] = x.weights[row] * scale;
    }
    interleave_heads(scratch.rows.data(), x.heads, lanes, stride, scratch.queries.data() + i * x.heads * lanes);
  }
}

// scratch.scores [queries, stride] of queries [t, end) of sequence s against `num` of its entries: the first ones, or
// those of the given numbers; stride >= num + 47.
template <class T>
void score(const Indexer<T>& x, int64_t s, int64_t t, int64_t end, const int32_t* numbers, int64_t num, int64_t stride,
           Scratch& scratch) {
  using M = Multiplied<T>;
  const int64_t lanes = M::lanes(x.dim), row_stride = (lanes + kLanes - 1) / kLanes * kLanes;
  prepare_queries<M>(x, t, end, lanes, row_stride, scratch);
  scratch.tile.resize(row_stride * kTileKeys);
  float scales[kTileKeys];
  for (int64_t start = 0; start < num; start += kTileKeys) {
    for (int j = 0; j < kTileKeys; ++j) {
      const int64_t column = std::min(start + j, num - 1);
      const T* key = x.keys.entry(x.batch.block_tables + s * x.batch.max_blocks, numbers ? numbers[column] : column);
      scales[j] = M::prepare(key, x.dim, scratch.rows.data() + j * row_stride);
    }
    transpose_tile(scratch.rows.data(), row_stride, scratch.tile.data());
    for (int64_t i = 0; i < end - t; ++i)
      score_tile<M>(scratch.queries.data() + i * x.heads * lanes, scratch.query_weights.data() + i * x.heads, x.heads,
                    lanes, scratch.tile.data(), scales, scratch.scores.data() + i * stride + start);
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
