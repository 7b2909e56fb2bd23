// Rows rounded as packed records would keep them.
#include "records.h"

namespace headrace {

constexpr int64_t kSerial = 1 << 14;  // elements that are not worth waking threads for

template <class T>
void round_rows(const Record& r, const T* x, int64_t rows, T* out) {
#pragma omp parallel if (rows * r.dim > kSerial)
  {
    Floats row(r.dim);
    std::vector<uint8_t> scratch(r.value_bytes() + r.scale_bytes());
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      widen(x + i * r.dim, r.dim, row.data());
      round_row(r, row.data(), scratch.data());
      narrow(row.data(), r.dim, out + i * r.dim);
    }
  }
}

}  // namespace headrace

using namespace headrace;

HEADRACE_API void headrace_round_rows(int is_bf16, const void* x, int64_t rows, int64_t dim, int64_t plain_dim,
                                      int64_t block, int64_t element_bits, int64_t padding, int scale, float smallest,
                                      void* out) {
  const Record record{dim, plain_dim, block, element_bits, padding, static_cast<Scale>(scale), smallest};
  if (is_bf16)
    round_rows(record, static_cast<const bf16*>(x), rows, static_cast<bf16*>(out));
  else
    round_rows(record, static_cast<const float*>(x), rows, static_cast<float*>(out));
}
