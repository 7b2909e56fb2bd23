// The lightning indexer: scores of compressed entries, and the choice of the best ones.
//
// score(t, g) = sum_h weight[t, h] * relu(q[t, h] . key[g]). Keys are read in place, by block table. With AVX-512, 48 keys
// at a time are widened to fp32 and transposed, so that a register's lanes are keys and no sum across lanes is needed
// (fp32 and not bf16 products: see key_products.h).
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
  int64_t heads, dim, ratio, topk;
  int32_t* selected;  // [tokens, topk]
};

struct Scratch {  // one thread's
  std::vector<float> scores, queries, tile;
  std::vector<uint32_t> keys, rest;
};

#ifdef HEADRACE_AVX512
constexpr int kTileKeys = 48;

// keys [48] of `dim` -> tile [dim, 48].
template <class T>
inline void transpose_tile(const T* const* keys, int64_t dim, float* tile) {
  for (int64_t k = 0; k < dim; ++k)
    for (int j = 0; j < kTileKeys; ++j) tile[k * kTileKeys + j] = to_float(keys[j][k]);
}

// scores[48] += sum over H heads of weight * relu(q[h] . key), q [H, dim].
template <int H>
inline void add_scores(const float* q, const float* weights, const float* tile, int64_t dim, __m512* scores) {
  __m512 dots[H][3];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) dots[h][0] = dots[h][1] = dots[h][2] = _mm512_setzero_ps();
  for (int64_t k = 0; k < dim; ++k) {
    const __m512 a = _mm512_loadu_ps(tile + k * kTileKeys), b = _mm512_loadu_ps(tile + k * kTileKeys + 16),
                 c = _mm512_loadu_ps(tile + k * kTileKeys + 32);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const __m512 x = _mm512_set1_ps(q[h * dim + k]);
      dots[h][0] = _mm512_fmadd_ps(a, x, dots[h][0]);
      dots[h][1] = _mm512_fmadd_ps(b, x, dots[h][1]);
      dots[h][2] = _mm512_fmadd_ps(c, x, dots[h][2]);
    }
  }
  const __m512 zero = _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
    const __m512 weight = _mm512_set1_ps(weights[h]);
    for (int j = 0; j < 3; ++j) scores[j] = _mm512_fmadd_ps(_mm512_max_ps(dots[h][j], zero), weight, scores[j]);
  }
}

inline void score_tile(const float* q, const float* weights, int64_t heads, int64_t dim, const float* tile,
                       float* out) {
  __m512 scores[3] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t head = 0;
  for (; head + 8 <= heads; head += 8) add_scores<8>(q + head * dim, weights + head, tile, dim, scores);
  for (; head < heads; ++head) add_scores<1>(q + head * dim, weights + head, tile, dim, scores);
  for (int j = 0; j < 3; ++j) _mm512_storeu_ps(out + 16 * j, scores[j]);
}

// scratch.scores [queries, stride] of queries [t, end) of sequence s against its first `num` entries;
// stride >= num + 47.
template <class T>
void score(const Indexer<T>& x, int64_t s, int64_t t, int64_t end, int64_t num, int64_t stride, Scratch& scratch) {
  const int64_t query_size = x.heads * x.dim;
  scratch.queries.resize(kQueries * query_size);
  scratch.tile.resize(x.dim * kTileKeys);
  widen(x.q + t * query_size, (end - t) * query_size, scratch.queries.data());
  const T* keys[kTileKeys];
  for (int64_t start = 0; start < num; start += kTileKeys) {
    for (int j = 0; j < kTileKeys; ++j)
      keys[j] = x.keys.entry(x.batch.block_tables + s * x.batch.max_blocks, std::min(start + j, num - 1));
    transpose_tile(keys, x.dim, scratch.tile.data());
    for (int64_t i = 0; i < end - t; ++i)
      score_tile(scratch.queries.data() + i * query_size, x.weights + (t + i) * x.heads, x.heads, x.dim,
                 scratch.tile.data(), scratch.scores.data() + i * stride + start);
  }
}
#else
constexpr int kTileKeys = 1;

template <class T>
void score(const Indexer<T>& x, int64_t s, int64_t t, int64_t end, int64_t num, int64_t stride, Scratch& scratch) {
  const int32_t* blocks = x.batch.block_tables + s * x.batch.max_blocks;
  for (int64_t query = t; query < end; ++query)
    for (int64_t g = 0; g < num; ++g) {
      const T* key = x.keys.entry(blocks, g);
      float sum = 0.0f;
      multiply_rows<T, 1>(&key, x.q + query * x.heads * x.dim, x.dim, 0, x.heads, [&](int, int64_t h, float value) {
        sum += std::max(value, 0.0f) * x.weights[query * x.heads + h];
      });
      scratch.scores[(query - t) * stride + g] = sum;
    }
}
#endif

// A key that sorts as the float does (NaN above all): negative floats with all bits turned, others with the sign bit.
inline uint32_t order_key(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

// The k-th largest of n > k keys: which 2^-12 of the key range holds it by counting, then the exact one within that.
inline uint32_t kth_largest(const uint32_t* keys, int64_t n, int64_t k, std::vector<uint32_t>& rest) {
  constexpr int kShift = 20;
  int32_t counts[1 << (32 - kShift)] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> kShift];
  uint32_t bucket = (1u << (32 - kShift)) - 1;
  int64_t above = 0;
  while (above + counts[bucket] < k) above += counts[bucket--];
  rest.clear();
  for (int64_t i = 0; i < n; ++i)
    if (keys[i] >> kShift == bucket) rest.push_back(keys[i]);
  const auto nth = rest.begin() + (k - above - 1);
  std::nth_element(rest.begin(), nth, rest.end(), [](uint32_t a, uint32_t b) { return a > b; });
  return *nth;
}

// The numbers of the k best of n scores in ascending order, lower numbers first among equals; -1 up to k.
inline void choose_entries(const float* scores, int64_t n, int64_t k, Scratch& scratch, int32_t* out) {
  if (n <= k) {
    for (int64_t i = 0; i < k; ++i) out[i] = i < n ? static_cast<int32_t>(i) : -1;
    return;
  }
  scratch.keys.resize(n);
  uint32_t* keys = scratch.keys.data();
  for (int64_t i = 0; i < n; ++i) keys[i] = order_key(scores[i]);
  const uint32_t least = kth_largest(keys, n, k, scratch.rest);
  int64_t num_ties = k;
  for (int64_t i = 0; i < n; ++i) num_ties -= keys[i] > least;
  for (int64_t i = 0; i < n; ++i)
    if (keys[i] > least || (keys[i] == least && num_ties-- > 0)) *out++ = static_cast<int32_t>(i);
}

struct QueryBlock {
  int64_t sequence, first, last;
};

template <class T>
void select(const Indexer<T>& x) {
  std::vector<QueryBlock> blocks;
  for (int64_t s = 0; s < x.batch.num_sequences; ++s)
    for (int64_t t = x.batch.query_starts[s]; t < x.batch.query_starts[s + 1]; t += kQueries)
      blocks.push_back({s, t, std::min(t + kQueries, x.batch.query_starts[s + 1])});
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
#pragma omp parallel if (num_blocks > 1)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t i = num_blocks - 1; i >= 0; --i) {  // the longest first
      const QueryBlock& b = blocks[i];
      const auto visible = [&](int64_t t) { return (x.batch.position(b.sequence, t) + 1) / x.ratio; };
      const int64_t num = visible(b.last - 1), stride = num + kTileKeys;
      scratch.scores.resize(kQueries * stride);
      if (num > x.topk) score(x, b.sequence, b.first, b.last, num, stride, scratch);
      for (int64_t t = b.first; t < b.last; ++t)
        choose_entries(scratch.scores.data() + (t - b.first) * stride, visible(t), x.topk, scratch,
                       x.selected + t * x.topk);
    }
  }
}

template <class T>
void select_typed(const void* q, const float* weights, const Batch& batch, const void* keys, int64_t block_stride,
                  int64_t per_block, int64_t heads, int64_t dim, int64_t ratio, int64_t topk, int32_t* selected) {
  select(Indexer<T>{batch,
                    {static_cast<const T*>(keys), block_stride, per_block, dim},
                    static_cast<const T*>(q),
                    weights,
                    heads,
                    dim,
                    ratio,
                    topk,
                    selected});
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_select_entries(int is_bf16, const void* q, const float* weights, const int64_t* query_starts,
                                          const int64_t* context_lens, const int32_t* block_tables,
                                          int64_t num_sequences, int64_t max_blocks, const void* keys,
                                          int64_t block_stride, int64_t per_block, int64_t heads, int64_t dim,
                                          int64_t ratio, int64_t topk, int32_t* selected) {
  const Batch batch{query_starts, context_lens, nullptr, block_tables, num_sequences, max_blocks};
  const auto call = is_bf16 ? select_typed<bf16> : select_typed<float>;
  call(q, weights, batch, keys, block_stride, per_block, heads, dim, ratio, topk, selected);
}
