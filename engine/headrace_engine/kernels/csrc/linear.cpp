// Products of a few rows with a weight stored [out, in], plain or block diagonal.
#include <vector>

#include "dot_tile.h"

namespace headrace {

constexpr int64_t kColumnBlock = 64;          // a block of weights stays in the first cache while all rows use it
constexpr int64_t kParallelWeights = 1 << 16;  // weights times rows below which a second thread costs more than it saves

// y [rows, groups, columns] = x [rows, groups, k] times weight [groups, columns, k], group by group.
template <class T, class Out>
void grouped_linear(const T* x, const T* weight, int64_t rows, int64_t groups, int64_t columns, int64_t k, Out* y) {
  const int64_t blocks = (columns + kColumnBlock - 1) / kColumnBlock;
#pragma omp parallel if (rows * groups * columns * k > kParallelWeights)
  {
    std::vector<const T*> x_rows(rows);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < groups * blocks; ++item) {
      const int64_t group = item / blocks, first = item % blocks * kColumnBlock;
      const int64_t last = std::min(first + kColumnBlock, columns);
      for (int64_t row = 0; row < rows; ++row) x_rows[row] = x + (row * groups + group) * k;
      multiply(x_rows.data(), rows, weight + group * columns * k, k, first, last,
               [&](int64_t row, int64_t column, float value) {
                 store(y + (row * groups + group) * columns + column, value);
               });
    }
  }
}

}  // namespace headrace

HEADRACE_API void headrace_linear(int is_bf16, int out_bf16, const void* x, const void* weight, int64_t rows,
                                  int64_t groups, int64_t columns, int64_t k, void* y) {
  using namespace headrace;
  if (!is_bf16)
    grouped_linear(static_cast<const float*>(x), static_cast<const float*>(weight), rows, groups, columns, k,
                   static_cast<float*>(y));
  else if (out_bf16)
    grouped_linear(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), rows, groups, columns, k,
                   static_cast<bf16*>(y));
  else
    grouped_linear(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), rows, groups, columns, k,
                   static_cast<float*>(y));
}
