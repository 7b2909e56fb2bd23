// The lightning indexer's choice of entries, in one level or two (scores: index_scores.h).
#include <omp.h>

#include "index_scores.h"

namespace headrace {

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

// The num_runs best of the runs of `size` entries that n visible ones make: by their best entry, the last run always.
inline void choose_runs(const float* scores, int64_t n, int64_t size, int64_t num_runs, Scratch& scratch,
                        int32_t* out) {
  const int64_t num = (n + size - 1) / size;
  scratch.best.resize(num);
  if (num > num_runs) {
    for (int64_t run = 0; run < num; ++run)
      scratch.best[run] = *std::max_element(scores + run * size, scores + std::min((run + 1) * size, n));
    scratch.best[num - 1] = HUGE_VALF;
  }
  choose_entries(scratch.best.data(), num, num_runs, scratch, out);
}

// What is chosen for every token; `runs` is null where only entries are.
struct Choice {
  int64_t topk;
  int32_t* selected;  // [tokens, topk]
  int64_t run_size, num_runs;
  int32_t* runs;  // [tokens, num_runs]
};

struct QueryBlock {
  int64_t sequence, first, last;
};

inline std::vector<QueryBlock> query_blocks(const Batch& batch, int64_t size) {
  std::vector<QueryBlock> blocks;
  for (int64_t s = 0; s < batch.num_sequences; ++s)
    for (int64_t t = batch.query_starts[s]; t < batch.query_starts[s + 1]; t += size)
      blocks.push_back({s, t, std::min(t + size, batch.query_starts[s + 1])});
  return blocks;
}

// Calls f(block, by_all, scratch) for every block. A thread takes one block at a time, but where there are fewer blocks
// than threads they come one after the other, `by_all` threads.
template <class F>
void for_each_block(const std::vector<QueryBlock>& blocks, const F& f) {
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  if (num_blocks < omp_get_max_threads()) {
    Scratch scratch;
    for (const QueryBlock& block : blocks) f(block, true, scratch);
    return;
  }
#pragma omp parallel if (num_blocks > 1)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t i = num_blocks - 1; i >= 0; --i) f(blocks[i], false, scratch);  // the longest first
  }
}

constexpr int64_t kLeastPart = 1024;  // entries that are worth another thread's while

// scratch.scores [queries, num + kTileKeys] of one block, see `score`; by_all: each thread scores a part of the entries.
template <class T>
void score_block(const Indexer<T>& x, const QueryBlock& b, const int32_t* numbers, int64_t num, bool by_all,
                 Scratch& scratch) {
  const int64_t stride = num + kTileKeys, per_block = x.keys.per_block;
  scratch.scores.resize((b.last - b.first) * stride);
  const int64_t wanted = std::max(kLeastPart, num / (2 * omp_get_max_threads()));  // two each: cores are not alike
  const int64_t size = (wanted + per_block - 1) / per_block * per_block;
  if (!by_all || num <= size) return score(x, b.sequence, b.first, b.last, numbers, num, stride, scratch);
#pragma omp parallel
  {
    Scratch own;
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < num; first += size) {
      const int64_t count = std::min(size, num - first), own_stride = count + kTileKeys;
      Indexer<T> part = x;
      if (!numbers) part.batch.block_tables += first / per_block;
      own.scores.resize((b.last - b.first) * own_stride);
      score(part, b.sequence, b.first, b.last, numbers ? numbers + first : nullptr, count, own_stride, own);
      for (int64_t i = 0; i < b.last - b.first; ++i)
        std::copy_n(own.scores.data() + i * own_stride, count, scratch.scores.data() + i * stride + first);
    }
  }
}

template <class T>
void select(const Indexer<T>& x, const Choice& choice) {
  for_each_block(query_blocks(x.batch, kQueries), [&](const QueryBlock& b, bool by_all, Scratch& scratch) {
    const int64_t num = x.visible(b.sequence, b.last - 1), stride = num + kTileKeys;
    const bool all_runs = !choice.runs || num <= choice.num_runs * choice.run_size;
    if (num > choice.topk || !all_runs) score_block(x, b, nullptr, num, by_all, scratch);
    for (int64_t t = b.first; t < b.last; ++t) {
      const float* scores = scratch.scores.data() + (t - b.first) * stride;
      const int64_t visible = x.visible(b.sequence, t);
      choose_entries(scores, visible, choice.topk, scratch, choice.selected + t * choice.topk);
      if (choice.runs)
        choose_runs(scores, visible, choice.run_size, choice.num_runs, scratch, choice.runs + t * choice.num_runs);
    }
  });
}

// scratch.numbers: the entries of token t's runs, of those that it sees.
template <class T>
void list_candidates(const Indexer<T>& x, int64_t s, int64_t t, const Choice& choice, Scratch& scratch) {
  const int32_t* runs = choice.runs + t * choice.num_runs;
  const int64_t visible = x.visible(s, t);
  scratch.numbers.clear();
  for (int64_t run = 0; run < choice.num_runs && runs[run] >= 0; ++run)
    for (int64_t g = runs[run] * choice.run_size; g < std::min((runs[run] + 1) * choice.run_size, visible); ++g)
      scratch.numbers.push_back(static_cast<int32_t>(g));
}

// As `select` among the entries of each token's runs only. No two tokens have the same, so each has tiles of its own,
// unless there are so few others that scoring all once for the whole block is less work.
template <class T>
void select_within(const Indexer<T>& x, const Choice& choice) {
  // What making a tile of keys costs, in products of it with one query.
  constexpr int64_t kTileCost = kTileKeys > 1 ? 1 : 0;
  for_each_block(query_blocks(x.batch, kQueries), [&](const QueryBlock& b, bool by_all, Scratch& scratch) {
    const int64_t visible = x.visible(b.sequence, b.last - 1), queries = b.last - b.first;
    const int64_t num_candidates = choice.num_runs * choice.run_size;
    const bool together =
        visible > choice.topk && visible * (queries + kTileCost) <= num_candidates * queries * (1 + kTileCost);
    if (together) score_block(x, b, nullptr, visible, by_all, scratch);
    for (int64_t t = b.first; t < b.last; ++t) {
      list_candidates(x, b.sequence, t, choice, scratch);
      const int64_t num = static_cast<int64_t>(scratch.numbers.size());
      const float* scores = scratch.scores.data();
      if (together) {
        scratch.best.resize(num);
        for (int64_t i = 0; i < num; ++i)
          scratch.best[i] = scores[(t - b.first) * (visible + kTileKeys) + scratch.numbers[i]];
        scores = scratch.best.data();
      } else if (num > choice.topk) {
        score_block(x, {b.sequence, t, t + 1}, scratch.numbers.data(), num, by_all, scratch);
        scores = scratch.scores.data();
      }
      int32_t* selected = choice.selected + t * choice.topk;
      choose_entries(scores, num, choice.topk, scratch, selected);
      for (int64_t k = 0; k < std::min(num, choice.topk); ++k) selected[k] = scratch.numbers[selected[k]];
    }
  });
}

template <class T>
void select_typed(bool is_within, const void* q, const float* weights, const Batch& batch, const void* keys,
                  int64_t block_stride, int64_t per_block, int64_t heads, int64_t dim, int64_t ratio,
                  const Choice& choice) {
  const Pages<const T> pages{static_cast<const T*>(keys), block_stride, per_block, dim};
  const Indexer<T> indexer{batch, pages, static_cast<const T*>(q), weights, heads, dim, ratio};
  if (is_within)
    select_within(indexer, choice);
  else
    select(indexer, choice);
}

}  // namespace headrace

using namespace headrace;

// is_within: `runs` says where to choose; otherwise it is filled in, or null.
HEADRACE_API void headrace_select_entries(int is_bf16, int is_within, const void* q, const float* weights,
                                          const int64_t* query_starts, const int64_t* context_lens,
                                          const int32_t* block_tables, int64_t num_sequences, int64_t max_blocks,
                                          const void* keys, int64_t block_stride, int64_t per_block, int64_t heads,
                                          int64_t dim, int64_t ratio, int64_t topk, int32_t* selected,
                                          int64_t run_size, int64_t num_runs, int32_t* runs) {
  const Batch batch{query_starts, context_lens, nullptr, block_tables, num_sequences, max_blocks};
  const auto call = is_bf16 ? select_typed<bf16> : select_typed<float>;
  call(is_within, q, weights, batch, keys, block_stride, per_block, heads, dim, ratio,
       Choice{topk, selected, run_size, num_runs, runs});
}
