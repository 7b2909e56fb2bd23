// Manifold-constrained hyper-connections: mixing of the residual streams around a sublayer.
#include <vector>

#include "dot_tile.h"

namespace headrace {

constexpr int kMaxStreams = 8;
constexpr int64_t kParallelTokens = 8;  // one token is about 3 us
constexpr int64_t kTokens = 4;          // of many, so many share what is read of fn and the latency of Sinkhorn's steps
constexpr int64_t kManyTokens = 32;

// Sinkhorn-Knopp on a [n, n] matrix, columns first and last; every divisor has eps added.
inline void sinkhorn(float* a, int64_t n, int64_t iterations, float eps) {
  for (int64_t step = 0; step < 2 * iterations - 1; ++step) {
    const bool columns = step % 2 == 0;
    const int64_t outer = columns ? 1 : n, inner = columns ? n : 1;
    for (int64_t i = 0; i < n; ++i) {
      float sum = eps;
      for (int64_t j = 0; j < n; ++j) sum += a[i * outer + j * inner];
      for (int64_t j = 0; j < n; ++j) a[i * outer + j * inner] /= sum;
    }
  }
}

#ifdef HEADRACE_AVX512
// The same for N matrices of four streams: each is one register, a row is one of its quarters.
template <int N>
inline void sinkhorn4(float* a, int64_t iterations, float eps) {
  const __m512 epsilon = _mm512_set1_ps(eps);
  __m512 x[N];
  for (int i = 0; i < N; ++i) x[i] = _mm512_loadu_ps(a + 16 * i);
  for (int64_t step = 0; step < 2 * iterations - 1; ++step)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      __m512 sum;
      if (step % 2 == 0) {
        sum = _mm512_add_ps(x[i], _mm512_shuffle_f32x4(x[i], x[i], 0x4e));
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
      } else {
        sum = _mm512_add_ps(x[i], _mm512_permute_ps(x[i], 0x4e));
        sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
      }
      x[i] = _mm512_div_ps(x[i], _mm512_add_ps(sum, epsilon));
    }
  for (int i = 0; i < N; ++i) _mm512_storeu_ps(a + 16 * i, x[i]);
}
#endif

struct MixWeights {
  const float *fn, *base, *scale, *norm;
  int64_t num_streams, dim, iterations;
  float rms_eps, hc_eps;
};

// logits [num, outputs] = (fn[o] . x) / rms(x) of x [num <= kTokens, num_streams * dim].
inline void stream_logits(const float* x, int64_t num, const MixWeights& w, int64_t outputs, float* logits) {
  const int64_t size = w.num_streams * w.dim;
  const float* rows[kTokens];
  float factors[kTokens];
  for (int64_t i = 0; i < num; ++i) rows[i] = x + i * size, factors[i] = inverse_rms(rows[i], size, w.rms_eps);
  multiply(rows, num, w.fn, size, 0, outputs,
           [&](int64_t i, int64_t o, float value) { logits[i * outputs + o] = value * factors[i]; });
}

// out [dim] = RMSNorm(sum_i pre_i x_i); the sum is rounded to T first, since the norm reads it in the model's dtype.
template <class T>
inline void collapse(const float* x, const float* pre, const MixWeights& w, float* sum, T* out) {
  for (int64_t k = 0; k < w.dim; ++k) sum[k] = pre[0] * x[k];
  for (int64_t i = 1; i < w.num_streams; ++i) {
    const float* stream = x + i * w.dim;
    const float factor = pre[i];
#pragma omp simd
    for (int64_t k = 0; k < w.dim; ++k) sum[k] += factor * stream[k];
  }
#pragma omp simd
  for (int64_t k = 0; k < w.dim; ++k) sum[k] = rounded<T>(sum[k]);
  norm_row<T>(sum, w.norm, w.dim, w.rms_eps);
  narrow(sum, w.dim, out);
}

// The matrix [n, n] before it is made doubly stochastic.
inline void mixing_matrix(const float* logits, const float* base, float scale, const MixWeights& w, float* comb) {
  const int64_t n = w.num_streams;
  for (int64_t i = 0; i < n; ++i) {
    float* row = comb + i * n;
    float top = -INFINITY, sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) top = std::max(top, row[j] = scale * logits[i * n + j] + base[i * n + j]);
    for (int64_t j = 0; j < n; ++j) sum += row[j] = fast_exp(row[j] - top);
    for (int64_t j = 0; j < n; ++j) row[j] = row[j] / sum + w.hc_eps;
  }
}

// `num` <= kTokens matrices [n, n], made so.
inline void balance(float* comb, int64_t num, const MixWeights& w) {
  int64_t i = 0;
#ifdef HEADRACE_AVX512
  if (w.num_streams == 4 && num == kTokens) return sinkhorn4<kTokens>(comb, w.iterations, w.hc_eps);
  if (w.num_streams == 4)
    for (; i < num; ++i) sinkhorn4<1>(comb + 16 * i, w.iterations, w.hc_eps);
#endif
  for (; i < num; ++i) sinkhorn(comb + i * w.num_streams * w.num_streams, w.num_streams, w.iterations, w.hc_eps);
}

// given_pre [tokens, num_streams]: what to collapse with instead of this site's own, which goes to own_pre if that is given.
template <class T>
void mix(const T* streams, const MixWeights& w, int64_t tokens, const float* given_pre, T* normed, float* own_pre,
         float* post, float* comb) {
  const int64_t n = w.num_streams, size = n * w.dim, outputs = (2 + n) * n;
  const int64_t block = tokens < kManyTokens ? 1 : kTokens;
#pragma omp parallel if (tokens >= kParallelTokens)
  {
    Floats wide(block * size), sum(w.dim);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < tokens; first += block) {
      const int64_t num = std::min(block, tokens - first);
      float logits[kTokens * (2 + kMaxStreams) * kMaxStreams], pre[kMaxStreams];
      widen(streams + first * size, num * size, wide.data());
      stream_logits(wide.data(), num, w, outputs, logits);
      for (int64_t t = first; t < first + num; ++t) {
        const float* own = logits + (t - first) * outputs;
        for (int64_t i = 0; i < n; ++i) {
          pre[i] = sigmoid(w.scale[0] * own[i] + w.base[i]) + w.hc_eps;
          post[t * n + i] = 2.0f * sigmoid(w.scale[1] * own[n + i] + w.base[n + i]);
        }
        mixing_matrix(own + 2 * n, w.base + 2 * n, w.scale[2], w, comb + t * n * n);
        const float* shares = given_pre ? given_pre + t * n : pre;
        collapse(wide.data() + (t - first) * size, shares, w, sum.data(), normed + t * w.dim);
        if (own_pre) std::copy_n(pre, n, own_pre + t * n);
      }
      balance(comb + first * n * n, num, w);
    }
  }
}

template <class T>
void head(const T* streams, const MixWeights& w, int64_t tokens, T* normed) {
  const int64_t n = w.num_streams, size = n * w.dim;
#pragma omp parallel if (tokens >= kParallelTokens)
  {
    Floats wide(size + w.dim);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      float logits[kMaxStreams];
      widen(streams + t * size, size, wide.data());
      stream_logits(wide.data(), 1, w, n, logits);
      for (int64_t i = 0; i < n; ++i) logits[i] = sigmoid(w.scale[0] * logits[i] + w.base[i]) + w.hc_eps;
      collapse(wide.data(), logits, w, wide.data() + size, normed + t * w.dim);
    }
  }
}

// streams_j <- post_j * y + sum_i comb[i, j] * streams_i, in place: all streams of a slice are read before any is written.
template <class T>
void update(T* streams, const T* y, const float* post, const float* comb, int64_t tokens, int64_t n, int64_t dim) {
  constexpr int64_t kSlice = 64;
#pragma omp parallel for schedule(static) if (tokens >= 4 * kParallelTokens)
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t start = 0; start < dim; start += kSlice) {
      const int64_t width = std::min(kSlice, dim - start);
      float old[kMaxStreams][kSlice], output[kSlice], sum[kSlice];
      for (int64_t i = 0; i < n; ++i) widen(streams + (t * n + i) * dim + start, width, old[i]);
      widen(y + t * dim + start, width, output);
      for (int64_t j = 0; j < n; ++j) {
        const float factor = post[t * n + j];
        for (int64_t k = 0; k < width; ++k) sum[k] = factor * output[k];
        for (int64_t i = 0; i < n; ++i) {
          const float share = comb[(t * n + i) * n + j];
          for (int64_t k = 0; k < width; ++k) sum[k] += share * old[i][k];
        }
        narrow(sum, width, streams + (t * n + j) * dim + start);
      }
    }
  }
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_hc_mix(int is_bf16, const void* streams, const float* fn, const float* base,
                                  const float* scale, const float* norm, int64_t tokens, int64_t num_streams,
                                  int64_t dim, int64_t iterations, float rms_eps, float hc_eps,
                                  const float* given_pre, void* normed, float* own_pre, float* post, float* comb) {
  const MixWeights w{fn, base, scale, norm, num_streams, dim, iterations, rms_eps, hc_eps};
  if (is_bf16)
    mix(static_cast<const bf16*>(streams), w, tokens, given_pre, static_cast<bf16*>(normed), own_pre, post, comb);
  else
    mix(static_cast<const float*>(streams), w, tokens, given_pre, static_cast<float*>(normed), own_pre, post, comb);
}

HEADRACE_API void headrace_hc_head(int is_bf16, const void* streams, const float* fn, const float* base,
                                   const float* scale, const float* norm, int64_t tokens, int64_t num_streams,
                                   int64_t dim, float rms_eps, float hc_eps, void* normed) {
  const MixWeights w{fn, base, scale, norm, num_streams, dim, 0, rms_eps, hc_eps};
  if (is_bf16)
    head(static_cast<const bf16*>(streams), w, tokens, static_cast<bf16*>(normed));
  else
    head(static_cast<const float*>(streams), w, tokens, static_cast<float*>(normed));
}

HEADRACE_API void headrace_hc_update(int is_bf16, void* streams, const void* y, const float* post, const float* comb,
                                     int64_t tokens, int64_t num_streams, int64_t dim) {
  if (is_bf16)
    update(static_cast<bf16*>(streams), static_cast<const bf16*>(y), post, comb, tokens, num_streams, dim);
  else
    update(static_cast<float*>(streams), static_cast<const float*>(y), post, comb, tokens, num_streams, dim);
}
