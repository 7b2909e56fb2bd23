// Compressed KV entries: pooling of the groups that a step closes, norm, rotation, and the carry of open groups.
#include "batch.h"

namespace headrace {

template <class T, class Out>
struct Compressor {
  Batch batch;
  const T* rows;      // [tokens, 2 * width]: values, then gates without ape
  int64_t row_stride;
  const float* ape;  // [ratio, width]
  Ring<float> carry;  // rows as above, gates with ape
  Pages<Out> out;
  const float *norm, *frequencies;  // [dim], [half]
  int64_t dim, series, ratio, half;
  float eps;

  int64_t width() const { return series * dim; }
};

// `dim` values and gates (with ape) of one token, channels from `first`: of this step's rows or of the carry.
template <class T, class Out>
void read_slot(const Compressor<T, Out>& c, int64_t s, int64_t position, int64_t first, float* values, float* gates) {
  const int64_t start = c.batch.first_position(s);
  if (position < start) {
    const float* row = c.carry.row(c.batch.state_slots[s], position) + first;
    std::copy(row, row + c.dim, values);
    std::copy(row + c.width(), row + c.width() + c.dim, gates);
    return;
  }
  const T* row = c.rows + (c.batch.query_starts[s] + position - start) * c.row_stride + first;
  const float* ape = c.ape + position % c.ratio * c.width() + first;
  widen(row, c.dim, values);
  for (int64_t k = 0; k < c.dim; ++k) gates[k] = to_float(row[c.width() + k]) + ape[k];
}

struct Slots {
  Floats values, gates, top, sum, pooled, cos, sin;
};

// Entry g of sequence s. Two series: slots are series 0 of the group before (none for g = 0) and series 1 of this one.
template <class T, class Out>
void close_group(const Compressor<T, Out>& c, int64_t s, int64_t g, Slots& x) {
  const int64_t dim = c.dim;
  int64_t num_slots = 0;
  for (int64_t series = 0; series < c.series; ++series) {
    const int64_t group = g - (c.series - 1 - series);
    for (int64_t i = 0; group >= 0 && i < c.ratio; ++i, ++num_slots)
      read_slot(c, s, group * c.ratio + i, series * dim, &x.values[num_slots * dim], &x.gates[num_slots * dim]);
  }
  std::fill(x.top.begin(), x.top.end(), -INFINITY);
  std::fill(x.sum.begin(), x.sum.end(), 0.0f);
  std::fill(x.pooled.begin(), x.pooled.end(), 0.0f);
  float *top = x.top.data(), *sum = x.sum.data(), *pooled = x.pooled.data();
  for (int64_t i = 0; i < num_slots; ++i) {
    const float* gates = &x.gates[i * dim];
#pragma omp simd
    for (int64_t k = 0; k < dim; ++k) top[k] = std::max(top[k], gates[k]);
  }
  for (int64_t i = 0; i < num_slots; ++i) {
    const float *gates = &x.gates[i * dim], *values = &x.values[i * dim];
#pragma omp simd
    for (int64_t k = 0; k < dim; ++k) {
      const float power = fast_exp(gates[k] - top[k]);
      sum[k] += power;
      pooled[k] += power * values[k];
    }
  }
  for (int64_t k = 0; k < dim; ++k) pooled[k] /= sum[k];
  norm_row<Out>(pooled, c.norm, dim, c.eps);
  for (int64_t k = 0; k < c.half; ++k) {
    const float angle = static_cast<float>(g * c.ratio) * c.frequencies[k];
    x.cos[k] = std::cos(angle), x.sin[k] = std::sin(angle);
  }
  rotate_row(pooled, dim, x.cos.data(), x.sin.data(), c.half, 1.0f);
  narrow(pooled, dim, c.out.entry(c.batch.block_tables + s * c.batch.max_blocks, g));
}

// Only once every group is pooled: a long chunk's last rows take the place of rows that its first groups read.
template <class T, class Out>
void write_carry(const Compressor<T, Out>& c) {
  for (int64_t s = 0; s < c.batch.num_sequences; ++s) {
    const int64_t start = c.batch.query_starts[s], end = c.batch.query_starts[s + 1];
    for (int64_t t = std::max(start, end - c.carry.rows); t < end; ++t) {
      const int64_t position = c.batch.position(s, t);
      float* to = c.carry.row(c.batch.state_slots[s], position);
      const float* ape = c.ape + position % c.ratio * c.width();
      widen(c.rows + t * c.row_stride, 2 * c.width(), to);
      for (int64_t k = 0; k < c.width(); ++k) to[c.width() + k] += ape[k];
    }
  }
}

template <class T, class Out>
void compress(const Compressor<T, Out>& c) {
  std::vector<std::pair<int64_t, int64_t>> closing;  // (sequence, group)
  for (int64_t s = 0; s < c.batch.num_sequences; ++s)
    for (int64_t g = c.batch.first_position(s) / c.ratio; g < c.batch.context_lens[s] / c.ratio; ++g)
      closing.emplace_back(s, g);
  const int64_t num = static_cast<int64_t>(closing.size());
  if (num > 0) {
#pragma omp parallel if (num > 4)
    {
      Slots slots;
      slots.values.resize(c.series * c.ratio * c.dim);
      slots.gates.resize(c.series * c.ratio * c.dim);
      for (auto* buffer : {&slots.top, &slots.sum, &slots.pooled}) buffer->resize(c.dim);
      slots.cos.resize(c.half), slots.sin.resize(c.half);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < num; ++i) close_group(c, closing[i].first, closing[i].second, slots);
    }
  }
  write_carry(c);
}

template <class T, class Out>
void compress_typed(const void* rows, int64_t row_stride, const float* ape, const Batch& batch, float* carry, int64_t carry_slot_stride,
                    int64_t carry_rows, const float* norm, const float* frequencies, int64_t dim,
                    int64_t series, int64_t ratio, int64_t half, float eps, void* out, int64_t block_stride,
                    int64_t per_block) {
  compress(Compressor<T, Out>{batch,
                              static_cast<const T*>(rows),
                              row_stride,
                              ape,
                              {carry, carry_slot_stride, carry_rows, 2 * series * dim},
                              {static_cast<Out*>(out), block_stride, per_block, dim},
                              norm,
                              frequencies,
                              dim,
                              series,
                              ratio,
                              half,
                              eps});
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_compress(int rows_bf16, int out_bf16, const void* rows, int64_t row_stride,
                                    const float* ape,
                                    const int64_t* query_starts, const int64_t* context_lens,
                                    const int64_t* state_slots, const int32_t* block_tables, int64_t num_sequences,
                                    int64_t max_blocks, float* carry, int64_t carry_slot_stride, int64_t carry_rows,
                                    const float* norm, const float* frequencies, int64_t dim, int64_t series,
                                    int64_t ratio, int64_t half, float eps, void* out, int64_t block_stride,
                                    int64_t per_block) {
  const Batch batch{query_starts, context_lens, state_slots, block_tables, num_sequences, max_blocks};
  const auto call = rows_bf16 ? (out_bf16 ? compress_typed<bf16, bf16> : compress_typed<bf16, float>)
                              : (out_bf16 ? compress_typed<float, bf16> : compress_typed<float, float>);
  call(rows, row_stride, ape, batch, carry, carry_slot_stride, carry_rows, norm, frequencies, dim, series, ratio, half, eps, out,
       block_stride, per_block);
}
