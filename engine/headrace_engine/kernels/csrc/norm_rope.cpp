// RMSNorm, alone or followed by the rotary embedding.
#include <vector>

#include "common.h"

namespace headrace {

constexpr int64_t kParallelElements = 1 << 15;  // below this a second thread costs more than it saves

// x [rows, n], rows `stride` apart -> out [rows, n], which may be x. cos/sin [rows / heads, half]; null: no rotation.
template <class T>
void norm_rope(const T* x, const float* weight, const float* cos, const float* sin, int64_t rows, int64_t heads,
               int64_t n, int64_t half, int64_t stride, float eps, bool norm, T* out) {
#pragma omp parallel if (rows * n > kParallelElements)
  {
    Floats wide(n);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      widen(x + row * stride, n, wide.data());
      if (norm) norm_row<T>(wide.data(), weight, n, eps);
      if (cos) rotate_row(wide.data(), n, cos + row / heads * half, sin + row / heads * half, half, 1.0f);
      narrow(wide.data(), n, out + row * n);
    }
  }
}

}  // namespace headrace

HEADRACE_API void headrace_norm_rope(int is_bf16, const void* x, const float* weight, const float* cos,
                                     const float* sin, int64_t rows, int64_t heads, int64_t n, int64_t half,
                                     int64_t stride, float eps, int norm, void* out) {
  using namespace headrace;
  if (is_bf16)
    norm_rope(static_cast<const bf16*>(x), weight, cos, sin, rows, heads, n, half, stride, eps, norm != 0,
              static_cast<bf16*>(out));
  else
    norm_rope(static_cast<const float*>(x), weight, cos, sin, rows, heads, n, half, stride, eps, norm != 0,
              static_cast<float*>(out));
}
