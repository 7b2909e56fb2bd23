// SwiGLU experts over a few rows, and the router that picks them.
#include <vector>

#include "dot_tile.h"
#include "packed_fp4.h"
#include "records.h"

namespace headrace {

constexpr int64_t kRowsPerItem = 48;     // rows of one expert that one thread takes at a time
constexpr int64_t kFp4RowsPerItem = 96;  // of FP4, which each item unpacks anew

struct Item {
  int64_t expert, first, last;  // rows [first, last) of the order below
};

struct Weights {
  const void* data;       // [experts, n, k] in the model's dtype; or in FP4, as packed_fp4.h has it
  const uint8_t* scales;  // of FP4
  bool is_packed;
};

template <class T>
struct Experts {
  const T* rows;         // [., dim]
  const float* weights;  // [.] or null
  Weights w13, w2;       // [experts, 2 * width, dim], [experts, dim, width]
  int64_t dim, width;
  int64_t round_block;  // elements of what W2 reads that share an e4m3 scale; 0: it is not rounded
  float limit;
  T* out;  // [., dim]
};

template <class T>
struct Scratch {  // one thread's, for the rows of an item
  Floats gate_up;
  std::vector<T> hidden;
  std::vector<T, CacheAligned<T>> panel;
  Floats rounded;
  std::vector<uint8_t> record;
};

// emit(row, column, value or those of 16 columns): rows of k times the n columns of one expert.
template <class T, class Emit>
void multiply_expert(const Weights& w, int64_t expert, int64_t n, int64_t k, const T* const* x, int64_t num,
                     [[maybe_unused]] Scratch<T>& scratch, Emit emit) {
  const int64_t first = expert * n * k;
#ifdef HEADRACE_AVX512_BF16
  if constexpr (std::is_same_v<T, bf16>) {
    if (w.scales) {
      const Fp4Tiles tiles{static_cast<const uint32_t*>(w.data) + first / kFp4Inputs, w.scales + first / kFp4Row, k};
      return multiply_packed_fp4(x, num, tiles, n / kTileColumns, scratch.panel, emit);
    }
    if (w.is_packed) return multiply_packed(x, num, static_cast<const T*>(w.data) + first, k, 0, n, emit);
  }
#endif
  multiply(x, num, static_cast<const T*>(w.data) + first, k, 0, n, emit);
}

template <class T>
void down(const Experts<T>& e, const T* const* h, const int64_t* order, int64_t num, int64_t expert,
          Scratch<T>& scratch) {
  const auto share = [&](int64_t i) { return e.weights && !e.round_block ? e.weights[order[i]] : 1.0f; };
  multiply_expert(e.w2, expert, e.dim, e.width, h, num, scratch, [&](int64_t i, int64_t column, auto values) {
    store(e.out + order[i] * e.dim + column, times(values, share(i)));
  });
}

// h <- weight * h, as e4m3 numbers with a power of two for each block: what the model's own W2 reads in training.
template <class T>
void round_hidden(const Experts<T>& e, float weight, T* h, Scratch<T>& scratch) {
  const Record record{e.width, 0, e.round_block, 8, 0, Scale::kUe8m0, 1e-4f};
  scratch.rounded.resize(e.width);
  scratch.record.resize(record.value_bytes() + record.scale_bytes());
  float* wide = scratch.rounded.data();
  for (int64_t k = 0; k < e.width; ++k) wide[k] = rounded<T>(to_float(h[k]) * weight);
  round_row(record, wide, scratch.record.data());
  narrow(wide, e.width, h);
}

// out = weight * W2 (silu(min(gate, limit)) * clip(up, -limit, limit)) for rows order[0 .. num) of one expert.
template <class T>
void expert_rows(const Experts<T>& e, const int64_t* order, int64_t num, int64_t expert, Scratch<T>& scratch) {
  const T *x[kFp4RowsPerItem], *h[kFp4RowsPerItem];
  T* hidden = scratch.hidden.data();
  for (int64_t i = 0; i < num; ++i) x[i] = e.rows + order[i] * e.dim, h[i] = hidden + i * e.width;
  float* gate_up = scratch.gate_up.data();
  multiply_expert(e.w13, expert, 2 * e.width, e.dim, x, num, scratch, [&](int64_t i, int64_t column, auto values) {
    store(gate_up + i * 2 * e.width + column, values);
  });
  for (int64_t i = 0; i < num; ++i) {
    const float *gates = gate_up + i * 2 * e.width, *ups = gates + e.width;
#pragma omp simd
    for (int64_t k = 0; k < e.width; ++k) {
      const float gate = std::min(rounded<T>(gates[k]), e.limit);
      const float up = std::min(std::max(rounded<T>(ups[k]), -e.limit), e.limit);
      store(hidden + i * e.width + k, gate * sigmoid(gate) * up);
    }
    if (e.round_block) round_hidden(e, e.weights ? e.weights[order[i]] : 1.0f, hidden + i * e.width, scratch);
  }
  down(e, h, order, num, expert, scratch);
}

// Rows sorted by expert (stable), cut into items of one expert each. Rows of no expert are zeroed and left out.
template <class T>
std::vector<Item> plan(const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t dim,
                       int64_t rows_per_item, std::vector<int64_t>& order, T* out) {
  std::vector<int64_t> ends(num_experts + 1, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (experts && experts[row] < 0)
      std::memset(out + row * dim, 0, sizeof(T) * dim);
    else
      ++ends[(experts ? experts[row] : 0) + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) ends[e + 1] += ends[e];
  std::vector<Item> items;
  for (int64_t e = 0; e < num_experts; ++e)
    for (int64_t first = ends[e]; first < ends[e + 1]; first += rows_per_item)
      items.push_back({e, first, std::min(first + rows_per_item, ends[e + 1])});
  order.resize(ends[num_experts]);
  for (int64_t row = 0; row < num_rows; ++row)
    if (!experts || experts[row] >= 0) order[ends[experts ? experts[row] : 0]++] = row;
  return items;
}

template <class T>
void run_experts(const Experts<T>& e, const int64_t* experts, int64_t num_rows, int64_t num_experts) {
  std::vector<int64_t> order;
  const int64_t rows_per_item = e.w13.scales ? kFp4RowsPerItem : kRowsPerItem;
  const std::vector<Item> items = plan(experts, num_rows, num_experts, e.dim, rows_per_item, order, e.out);
  const int64_t num_items = static_cast<int64_t>(items.size());
#pragma omp parallel if (num_items > 1)
  {
    Scratch<T> scratch;
    scratch.gate_up.resize(rows_per_item * 2 * e.width);
    scratch.hidden.resize(rows_per_item * e.width);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i)
      expert_rows(e, order.data() + items[i].first, items[i].last - items[i].first, items[i].expert, scratch);
  }
}

template <class T>
void experts_typed(const void* rows, const int64_t* experts, const float* weights, Weights w13, Weights w2,
                   int64_t num_rows, int64_t num_experts, int64_t dim, int64_t width, int64_t round_block, float limit,
                   void* out) {
  run_experts(Experts<T>{static_cast<const T*>(rows), weights, w13, w2, dim, width, round_block, limit,
                         static_cast<T*>(out)},
              experts, num_rows, num_experts);
}

// out [tokens, dim] = the sum of each token's k rows, in fp32 and in their order.
template <class T>
void sum_choices(const T* rows, int64_t tokens, int64_t k, int64_t dim, T* out) {
  constexpr int64_t kSlice = 64;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t start = 0; start < dim; start += kSlice) {
      const int64_t width = std::min(kSlice, dim - start);
      float sum[kSlice] = {};
      for (int64_t i = 0; i < k; ++i) {
        const T* row = rows + (t * k + i) * dim + start;
        for (int64_t j = 0; j < width; ++j) sum[j] += to_float(row[j]);
      }
      narrow(sum, width, out + t * dim + start);
    }
}

// The k best of scores + bias, the lower index first among equals.
inline void choose(const float* scores, const float* bias, int64_t num_experts, int64_t k, float* keys, int64_t* ids) {
  for (int64_t e = 0; e < num_experts; ++e) keys[e] = scores[e] + (bias ? bias[e] : 0.0f);
  for (int64_t i = 0; i < k; ++i) {
    const int64_t best = std::max_element(keys, keys + num_experts) - keys;
    ids[i] = best;
    keys[best] = -INFINITY;
  }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(fast_exp(x)); }

template <class T>
void route(const T* x, const float* gate, const float* bias, const int64_t* forced, int64_t tokens, int64_t dim,
           int64_t num_experts, int64_t k, float scaling, int64_t* ids, float* weights) {
#pragma omp parallel if (tokens * num_experts * dim > (1 << 18))
  {
    Floats wide(dim), scores(num_experts), keys(num_experts);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      widen(x + t * dim, dim, wide.data());
      const float* row = wide.data();
      multiply_rows<float, 1>(&row, gate, dim, 0, num_experts,
                              [&](int, int64_t e, float value) { scores[e] = std::sqrt(softplus(value)); });
      int64_t* chosen = ids + t * k;
      if (forced)
        std::copy(forced + t * k, forced + (t + 1) * k, chosen);
      else
        choose(scores.data(), bias, num_experts, k, keys.data(), chosen);
      float sum = 1e-20f;
      for (int64_t i = 0; i < k; ++i) sum += scores[chosen[i]];
      for (int64_t i = 0; i < k; ++i) weights[t * k + i] = scores[chosen[i]] / sum * scaling;
    }
  }
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_experts(int is_bf16, int w13_packed, int w2_packed, const void* rows, const int64_t* experts,
                                   const float* weights, const void* w13, const uint8_t* w13_scales, const void* w2,
                                   const uint8_t* w2_scales, int64_t num_rows, int64_t num_experts, int64_t dim,
                                   int64_t width, int64_t round_block, float limit, void* out) {
  const auto call = is_bf16 ? experts_typed<bf16> : experts_typed<float>;
  call(rows, experts, weights, {w13, w13_scales, w13_packed != 0}, {w2, w2_scales, w2_packed != 0}, num_rows,
       num_experts, dim, width, round_block, limit, out);
}

HEADRACE_API void headrace_sum_choices(int is_bf16, const void* rows, int64_t tokens, int64_t k, int64_t dim,
                                       void* out) {
  if (is_bf16)
    sum_choices(static_cast<const bf16*>(rows), tokens, k, dim, static_cast<bf16*>(out));
  else
    sum_choices(static_cast<const float*>(rows), tokens, k, dim, static_cast<float*>(out));
}

HEADRACE_API void headrace_route(int is_bf16, const void* x, const float* gate, const float* bias,
                                 const int64_t* forced, int64_t tokens, int64_t dim, int64_t num_experts, int64_t k,
                                 float scaling, int64_t* ids, float* weights) {
  if (is_bf16)
    route(static_cast<const bf16*>(x), gate, bias, forced, tokens, dim, num_experts, k, scaling, ids, weights);
  else
    route(static_cast<const float*>(x), gate, bias, forced, tokens, dim, num_experts, k, scaling, ids, weights);
}
