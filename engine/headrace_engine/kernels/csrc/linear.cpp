// Products with a weight stored [out, in] (few rows) or packed (any number of rows), plain or block diagonal.
#include <vector>

#include "dot_tile.h"
#include "packed.h"

namespace headrace {

constexpr int64_t kColumnBlock = 128;
constexpr int64_t kRowBlock = 96;
constexpr int64_t kParallelWeights = 1 << 18;  // multiplications below which a second thread costs more than it saves

template <class T, class Out>
struct Linear {
  const T *x, *weight;  // [rows, groups, k], [groups, columns, k]
  int64_t rows, groups, columns, k;
  Out* y;  // [rows, groups, columns]
};

// Rows [first_row, last_row) times columns [first, last) of one group.
template <class T, class Out>
void plain_block(const Linear<T, Out>& l, int64_t group, const T* const* x, int64_t first_row, int64_t last_row,
                 int64_t first, int64_t last) {
  multiply(x, last_row - first_row, l.weight + group * l.columns * l.k, l.k, first, last,
           [&](int64_t row, int64_t column, float value) {
             store(l.y + ((first_row + row) * l.groups + group) * l.columns + column, value);
           });
}

#ifdef HEADRACE_AVX512_BF16
template <class Out>
void packed_block(const Linear<bf16, Out>& l, int64_t group, const bf16* const* x, int64_t first_row, int64_t last_row,
                  int64_t first, int64_t last) {
  multiply_packed(x, last_row - first_row, l.weight + group * l.columns * l.k, l.k, first, last,
                  [&](int64_t row, int64_t column, __m512 values) {
                    store(l.y + ((first_row + row) * l.groups + group) * l.columns + column, values);
                  });
}
#endif

template <class T, class Out, class Block>
void run_blocks(const Linear<T, Out>& l, Block block) {
  const int64_t column_blocks = (l.columns + kColumnBlock - 1) / kColumnBlock;
  const int64_t row_blocks = (l.rows + kRowBlock - 1) / kRowBlock, items = l.groups * column_blocks * row_blocks;
#pragma omp parallel for schedule(static) if (l.rows * l.groups * l.columns * l.k > kParallelWeights)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t row_block = item / (l.groups * column_blocks), group = item / column_blocks % l.groups;
    const int64_t first_row = row_block * kRowBlock, last_row = std::min(first_row + kRowBlock, l.rows);
    const int64_t first = item % column_blocks * kColumnBlock, last = std::min(first + kColumnBlock, l.columns);
    const T* x[kRowBlock];
    for (int64_t row = first_row; row < last_row; ++row) x[row - first_row] = l.x + (row * l.groups + group) * l.k;
    block(l, group, x, first_row, last_row, first, last);
  }
}

template <class T, class Out>
void linear(const void* x, const void* weight, int64_t rows, int64_t groups, int64_t columns, int64_t k, void* y,
            [[maybe_unused]] bool packed) {
  const Linear<T, Out> l{static_cast<const T*>(x), static_cast<const T*>(weight), rows, groups, columns, k,
                         static_cast<Out*>(y)};
#ifdef HEADRACE_AVX512_BF16
  if constexpr (std::is_same_v<T, bf16>)
    if (packed) return run_blocks(l, packed_block<Out>);
#endif
  run_blocks(l, plain_block<T, Out>);
}

}  // namespace headrace

// Whether this library reads packed weights.
HEADRACE_API int headrace_packs() {
#ifdef HEADRACE_AVX512_BF16
  return 1;
#else
  return 0;
#endif
}

HEADRACE_API void headrace_linear(int is_bf16, int out_bf16, int packed, const void* x, const void* weight,
                                  int64_t rows, int64_t groups, int64_t columns, int64_t k, void* y) {
  using namespace headrace;
  const auto call = !is_bf16 ? linear<float, float> : out_bf16 ? linear<bf16, bf16> : linear<bf16, float>;
  call(x, weight, rows, groups, columns, k, y, packed != 0);
}
