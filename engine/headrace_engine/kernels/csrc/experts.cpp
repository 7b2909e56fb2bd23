// SwiGLU experts over a few rows, and the router that picks them.
#include <vector>

#include "dot_tile.h"

namespace headrace {

constexpr int64_t kRowsPerItem = 16;  // rows of one expert that one thread takes at a time

struct Item {
  int64_t expert, first, last;  // rows [first, last) of the order below
};

struct Scratch {  // one thread's, for kRowsPerItem rows
  std::vector<float> gate_up;
  std::vector<uint8_t> hidden;  // in the model's dtype
};

// out = weight * (silu(min(gate, limit)) * clip(up, -limit, limit)) W2 for rows order[first .. last) of one expert.
template <class T>
void expert_rows(const T* rows, const float* weights, const int64_t* order, int64_t num, const T* w13, const T* w2,
                 int64_t dim, int64_t width, float limit, Scratch& scratch, T* out) {
  const T *x[kRowsPerItem], *h[kRowsPerItem];
  T* hidden = reinterpret_cast<T*>(scratch.hidden.data());
  for (int64_t i = 0; i < num; ++i) x[i] = rows + order[i] * dim, h[i] = hidden + i * width;
  float* gate_up = scratch.gate_up.data();
  multiply(x, num, w13, dim, 0, 2 * width,
           [&](int64_t i, int64_t column, float value) { gate_up[i * 2 * width + column] = value; });
  for (int64_t i = 0; i < num; ++i) {
    const float *gates = gate_up + i * 2 * width, *ups = gates + width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      const float gate = std::min(rounded<T>(gates[k]), limit);
      const float up = std::min(std::max(rounded<T>(ups[k]), -limit), limit);
      store(hidden + i * width + k, gate * sigmoid(gate) * up);
    }
  }
  multiply(h, num, w2, width, 0, dim, [&](int64_t i, int64_t column, float value) {
    store(out + order[i] * dim + column, rounded<T>(value) * (weights ? weights[order[i]] : 1.0f));
  });
}

// Rows sorted by expert (stable), cut into items of one expert each. Rows of no expert are zeroed and left out.
template <class T>
std::vector<Item> plan(const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t dim,
                       std::vector<int64_t>& order, T* out) {
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
    for (int64_t first = ends[e]; first < ends[e + 1]; first += kRowsPerItem)
      items.push_back({e, first, std::min(first + kRowsPerItem, ends[e + 1])});
  order.resize(ends[num_experts]);
  for (int64_t row = 0; row < num_rows; ++row)
    if (!experts || experts[row] >= 0) order[ends[experts ? experts[row] : 0]++] = row;
  return items;
}

template <class T>
void run_experts(const T* rows, const int64_t* experts, const float* weights, const T* w13, const T* w2,
                 int64_t num_rows, int64_t num_experts, int64_t dim, int64_t width, float limit, T* out) {
  std::vector<int64_t> order;
  const std::vector<Item> items = plan(experts, num_rows, num_experts, dim, order, out);
  const int64_t num_items = static_cast<int64_t>(items.size());
#pragma omp parallel if (num_items > 1)
  {
    Scratch scratch;
    scratch.gate_up.resize(kRowsPerItem * 2 * width);
    scratch.hidden.resize(kRowsPerItem * width * sizeof(T));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item& item = items[i];
      expert_rows(rows, weights, order.data() + item.first, item.last - item.first,
                  w13 + item.expert * 2 * width * dim, w2 + item.expert * dim * width, dim, width, limit, scratch, out);
    }
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
    std::vector<float> wide(dim), scores(num_experts), keys(num_experts);
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

HEADRACE_API void headrace_experts(int is_bf16, const void* rows, const int64_t* experts, const float* weights,
                                   const void* w13, const void* w2, int64_t num_rows, int64_t num_experts, int64_t dim,
                                   int64_t width, float limit, void* out) {
  if (is_bf16)
    run_experts(static_cast<const bf16*>(rows), experts, weights, static_cast<const bf16*>(w13),
                static_cast<const bf16*>(w2), num_rows, num_experts, dim, width, limit, static_cast<bf16*>(out));
  else
    run_experts(static_cast<const float*>(rows), experts, weights, static_cast<const float*>(w13),
                static_cast<const float*>(w2), num_rows, num_experts, dim, width, limit, static_cast<float*>(out));
}

HEADRACE_API void headrace_route(int is_bf16, const void* x, const float* gate, const float* bias,
                                 const int64_t* forced, int64_t tokens, int64_t dim, int64_t num_experts, int64_t k,
                                 float scaling, int64_t* ids, float* weights) {
  if (is_bf16)
    route(static_cast<const bf16*>(x), gate, bias, forced, tokens, dim, num_experts, k, scaling, ids, weights);
  else
    route(static_cast<const float*>(x), gate, bias, forced, tokens, dim, num_experts, k, scaling, ids, weights);
}
