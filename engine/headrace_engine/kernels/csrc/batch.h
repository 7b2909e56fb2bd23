// A step's flat batch as the kernels see it: which sequence and position each token row has, and where its cache lies.
#pragma once

#include <vector>

#include "common.h"

namespace headrace {

struct Batch {
  const int64_t* query_starts;  // [num_sequences + 1]
  const int64_t* context_lens;  // [num_sequences]
  const int64_t* state_slots;   // [num_sequences]
  const int32_t* block_tables;  // [num_sequences, max_blocks]
  int64_t num_sequences, max_blocks;

  int64_t first_position(int64_t s) const { return context_lens[s] - (query_starts[s + 1] - query_starts[s]); }
  int64_t position(int64_t s, int64_t t) const { return context_lens[s] - query_starts[s + 1] + t; }
};

inline std::vector<int32_t> sequence_of_token(const Batch& batch) {
  std::vector<int32_t> sequences(batch.query_starts[batch.num_sequences]);
  for (int64_t s = 0; s < batch.num_sequences; ++s)
    std::fill(sequences.begin() + batch.query_starts[s], sequences.begin() + batch.query_starts[s + 1],
              static_cast<int32_t>(s));
  return sequences;
}

// One layer of a state group [slots, layers, rows, dim]: the row of position p is p % rows.
template <class T>
struct Ring {
  T* base;  // at the layer
  int64_t slot_stride, rows, dim;

  T* row(int64_t slot, int64_t position) const { return base + slot * slot_stride + position % rows * dim; }
};

// One layer of a paged group [blocks, layers, per_block, dim].
template <class T>
struct Pages {
  T* base;  // at the layer
  int64_t block_stride, per_block, dim;

  T* entry(const int32_t* block_table, int64_t g) const {
    return base + block_table[g / per_block] * block_stride + g % per_block * dim;
  }
};

}  // namespace headrace
