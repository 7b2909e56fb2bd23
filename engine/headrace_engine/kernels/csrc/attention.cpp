// Attention whose keys are also its values, over a window of raw rows and compressed entries, softmax with a sink.
//
// One query's keys are read in place, wherever they lie (ring, this step's rows, cache blocks), in tiles of 32 rows
// that stay in the first cache for all heads; softmax is online, and starts at the sink: logit = top, sum = 1, value 0.
#include "batch.h"
#include "key_products.h"

namespace headrace {

template <class T>
struct Attention {
  Batch batch;
  Ring<const T> ring;
  Pages<const T> entries;  // base null: none
  const T *q, *kv;         // [tokens, heads, dim], [tokens, dim]
  const int64_t* window_starts;  // [num_sequences], first position that a window shows; null: 0
  const float *sinks, *cos, *sin;
  const int32_t* selected;  // [tokens, num_selected], -1 padded; null: every closed entry
  int64_t num_selected, ratio, heads, dim, window, half;
  float scale;
  T* out;

  // The first position that the window of `position` shows.
  int64_t lowest(int64_t s, int64_t position) const {
    return std::max(window_starts ? window_starts[s] : 0, position - window + 1);
  }
  int64_t closed(int64_t position) const { return entries.base ? (position + 1) / ratio : 0; }
};

// One sequence's rows where they lie.
template <class T>
struct InPlace {
  const Attention<T>& a;
  int64_t s;

  const T* window(int64_t p) const {
    const int64_t first = a.batch.first_position(s);
    return p < first ? a.ring.row(a.batch.state_slots[s], p) : a.kv + (a.batch.query_starts[s] + p - first) * a.dim;
  }
  const T* entry(int64_t g) const { return a.entries.entry(a.batch.block_tables + s * a.batch.max_blocks, g); }
};

// The rows that token t of sequence s attends, and behind them one tile of padding.
template <class T, class Rows, class Row>
void find_keys(const Attention<T>& a, int64_t t, int64_t s, const Rows& rows, std::vector<const Row*>& keys) {
  const int64_t position = a.batch.position(s, t);
  keys.clear();
  for (int64_t p = a.lowest(s, position); p <= position; ++p) keys.push_back(rows.window(p));
  if (a.selected) {
    const int32_t* chosen = a.selected + t * a.num_selected;
    for (int64_t i = 0; i < a.num_selected && chosen[i] >= 0; ++i) keys.push_back(rows.entry(chosen[i]));
  } else {
    for (int64_t g = 0; g < a.closed(position); ++g) keys.push_back(rows.entry(g));
  }
  keys.insert(keys.end(), kTile, keys[0]);
}

// logits, then powers relative to the new top; the old sums shrink by `factor`. Sixteen lanes at a time: lane l is of
// head l % H.
template <class P, int H, class T>
void add_powers(const T* const* q, const typename P::Row* const* keys, int num, int64_t dim, float scale,
                HeadBlock& b) {
  constexpr int kLanes = 16;
  P::template dot<H>(q, keys, num, dim, b);
  std::fill(b.powers + num * H, b.powers + kTile * H, -INFINITY);
  float tops[kLanes], sums[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) tops[l] = -INFINITY;
  for (int i = 0; i < kTile * H; i += kLanes)
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) tops[l] = std::max(tops[l], b.powers[i + l]);
  for (int h = 0; h < H; ++h) {
    float top = b.top[h];
    for (int l = h; l < kLanes; l += H) top = std::max(top, tops[l] * scale);
    b.factor[h] = fast_exp(b.top[h] - top);
    b.top[h] = top;
    for (int l = h; l < kLanes; l += H) tops[l] = top;
  }
  for (int i = 0; i < kTile * H; i += kLanes)
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) sums[l] += b.powers[i + l] = fast_exp(b.powers[i + l] * scale - tops[l]);
  for (int h = 0; h < H; ++h) {
    b.sum[h] *= b.factor[h];
    for (int l = h; l < kLanes; l += H) b.sum[h] += sums[l];
  }
}

// `num` keys for heads [head, head + H) of token t.
template <class P, int H, class T>
void attend(const Attention<T>& a, int64_t t, int64_t head, const typename P::Row* const* keys, int64_t num,
            HeadBlock& b) {
  const T* q[H];
  for (int h = 0; h < H; ++h) {
    q[h] = a.q + (t * a.heads + head + h) * a.dim;
    b.top[h] = a.sinks[head + h];
    b.sum[h] = 1.0f;
  }
  P::set_queries(q, H, a.dim, b);
  std::fill(b.values.begin(), b.values.begin() + H * padded(a.dim), 0.0f);
  for (int64_t start = 0; start < num; start += kTile) {
    const int count = static_cast<int>(std::min<int64_t>(kTile, num - start));
    add_powers<P, H>(q, keys + start, count, a.dim, a.scale, b);
    P::template add_values<H>(keys + start, count, a.dim, b);
  }
  for (int h = 0; h < H; ++h) {
    float* values = b.values.data() + h * padded(a.dim);
    P::restore_order(values, a.dim);
    const float factor = 1.0f / b.sum[h];
#pragma omp simd
    for (int64_t k = 0; k < a.dim; ++k) values[k] *= factor;
    float* turned = values + a.dim - 2 * a.half;  // the rest is rounded only once, by narrow
#pragma omp simd
    for (int64_t k = 0; k < 2 * a.half; ++k) turned[k] = rounded<T>(turned[k]);
    rotate_row(turned, 2 * a.half, a.cos + t * a.half, a.sin + t * a.half, a.half, -1.0f);
    narrow(values, a.dim, a.out + (t * a.heads + head + h) * a.dim);
  }
}

template <class P, class T>
void attend_heads(const Attention<T>& a, int64_t t, int64_t head, int64_t end,
                  const std::vector<const typename P::Row*>& keys, HeadBlock& block) {
  const int64_t num = static_cast<int64_t>(keys.size()) - kTile;
  for (; head + 8 <= end; head += 8) attend<P, 8>(a, t, head, keys.data(), num, block);
  for (; head + 4 <= end; head += 4) attend<P, 4>(a, t, head, keys.data(), num, block);
  for (; head + 2 <= end; head += 2) attend<P, 2>(a, t, head, keys.data(), num, block);
  for (; head < end; ++head) attend<P, 1>(a, t, head, keys.data(), num, block);
}

// One sequence's rows as integers: those that a window of its tokens shows, then the entries.
struct FixedKeys {
  int64_t first, num_window;
  FixedRows rows;

  const int16_t* window(int64_t p) const { return rows.row(p - first); }
  const int16_t* entry(int64_t g) const { return rows.row(num_window + g); }
};

#ifdef HEADRACE_AVX512_VNNI
constexpr int64_t kUses = 4;  // of a row, from which on it is made integers: that costs as much as one or two

// Empty where too few tokens would use them.
inline FixedKeys fixed_keys(const Attention<bf16>& a, int64_t s) {
  const int64_t end = a.batch.context_lens[s], num_tokens = a.batch.query_starts[s + 1] - a.batch.query_starts[s];
  FixedKeys keys{a.lowest(s, end - num_tokens), 0, {}};
  keys.num_window = end - keys.first;
  const int64_t num_entries = a.closed(end - 1), num = keys.num_window + num_entries;
  const int64_t num_chosen = a.selected ? std::min(a.num_selected, num_entries) : num_entries;
  if (num_tokens * (std::min(a.window, end) + num_chosen) < kUses * num) return keys;
  keys.rows.resize(num, a.dim);
  const InPlace<bf16> rows{a, s};
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < num; ++i)
    keys.rows.set(i, i < keys.num_window ? rows.window(keys.first + i) : rows.entry(i - keys.num_window), a.dim);
  return keys;
}
#endif

template <class T>
std::vector<FixedKeys> fixed_keys_of_sequences(const Attention<T>& a) {
  std::vector<FixedKeys> keys(a.batch.num_sequences);
#ifdef HEADRACE_AVX512_VNNI
  if constexpr (std::is_same_v<T, bf16>)
    for (int64_t s = 0; s < a.batch.num_sequences; ++s) keys[s] = fixed_keys(a, s);
#endif
  return keys;
}

// Heads [head, end) of token t of sequence s.
template <class T>
void attend_token(const Attention<T>& a, int64_t t, int64_t s, int64_t head, int64_t end,
                  [[maybe_unused]] const FixedKeys& fixed, HeadBlock& block) {
#ifdef HEADRACE_AVX512_VNNI
  if constexpr (std::is_same_v<T, bf16>)
    if (!fixed.rows.empty()) {
      std::vector<const int16_t*> keys;
      find_keys(a, t, s, fixed, keys);
      return attend_heads<FixedProducts>(a, t, head, end, keys, block);
    }
#endif
  std::vector<const T*> keys;
  find_keys(a, t, s, InPlace<T>{a, s}, keys);
  attend_heads<Products<T>>(a, t, head, end, keys, block);
}

// Blocks of `width` heads are independent work: narrower blocks only where there are too few to occupy the threads.
template <class T>
void run(const Attention<T>& a, int64_t num_threads) {
  const std::vector<int32_t> sequences = sequence_of_token(a.batch);
  const std::vector<FixedKeys> fixed = fixed_keys_of_sequences(a);
  const int64_t tokens = static_cast<int64_t>(sequences.size());
  const int64_t width = tokens * (a.heads / 8) < num_threads ? 4 : 8;
  const int64_t blocks = (a.heads + width - 1) / width;
#pragma omp parallel if (tokens * blocks > 1)
  {
    HeadBlock block;
    block.queries.resize(8 * padded(a.dim));
    block.values.resize(8 * padded(a.dim));
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < tokens * blocks; ++item) {
      const int64_t t = item / blocks, head = item % blocks * width;
      attend_token(a, t, sequences[t], head, std::min(head + width, a.heads), fixed[sequences[t]], block);
    }
  }
}

template <class T>
void write_ring(const T* rows, const Ring<T>& ring, const Batch& batch) {
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t start = batch.query_starts[s], end = batch.query_starts[s + 1];
    for (int64_t t = std::max(start, end - ring.rows); t < end; ++t)
      std::memcpy(ring.row(batch.state_slots[s], batch.position(s, t)), rows + t * ring.dim, sizeof(T) * ring.dim);
  }
}

template <class T>
void attention(const void* q, const void* kv, const Batch& batch, const int64_t* window_starts, const void* ring, int64_t ring_slot_stride,
               int64_t ring_rows, const float* sinks, const float* cos, const float* sin, const void* entries,
               int64_t block_stride, int64_t per_block, int64_t ratio, const int32_t* selected, int64_t num_selected,
               int64_t heads, int64_t dim, int64_t window, int64_t half, float scale, int64_t num_threads, void* out) {
  const Attention<T> a{batch,
                       {static_cast<const T*>(ring), ring_slot_stride, ring_rows, dim},
                       {static_cast<const T*>(entries), block_stride, per_block, dim},
                       static_cast<const T*>(q),
                       static_cast<const T*>(kv),
                       window_starts,
                       sinks,
                       cos,
                       sin,
                       selected,
                       num_selected,
                       ratio,
                       heads,
                       dim,
                       window,
                       half,
                       scale,
                       static_cast<T*>(out)};
  run(a, num_threads);
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_attention(int is_bf16, const void* q, const void* kv, const int64_t* query_starts,
                                     const int64_t* context_lens, const int64_t* state_slots,
                                     const int32_t* block_tables, const int64_t* window_starts, int64_t num_sequences,
                                     int64_t max_blocks, const void* ring, int64_t ring_slot_stride, int64_t ring_rows, const float* sinks,
                                     const float* cos, const float* sin, const void* entries, int64_t block_stride,
                                     int64_t per_block, int64_t ratio, const int32_t* selected, int64_t num_selected,
                                     int64_t heads, int64_t dim, int64_t window, int64_t half, float scale,
                                     int64_t num_threads, void* out) {
  const Batch batch{query_starts, context_lens, state_slots, block_tables, num_sequences, max_blocks};
  const auto call = is_bf16 ? attention<bf16> : attention<float>;
  call(q, kv, batch, window_starts, ring, ring_slot_stride, ring_rows, sinks, cos, sin, entries, block_stride, per_block, ratio,
       selected, num_selected, heads, dim, window, half, scale, num_threads, out);
}

HEADRACE_API void headrace_write_ring(int is_bf16, const void* rows, const int64_t* query_starts,
                                      const int64_t* context_lens, const int64_t* state_slots, int64_t num_sequences,
                                      void* ring, int64_t ring_slot_stride, int64_t ring_rows, int64_t dim) {
  const Batch batch{query_starts, context_lens, state_slots, nullptr, num_sequences, 0};
  if (is_bf16)
    write_ring(static_cast<const bf16*>(rows), Ring<bf16>{static_cast<bf16*>(ring), ring_slot_stride, ring_rows, dim},
               batch);
  else
    write_ring(static_cast<const float*>(rows),
               Ring<float>{static_cast<float*>(ring), ring_slot_stride, ring_rows, dim}, batch);
}
