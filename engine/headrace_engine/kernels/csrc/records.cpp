// Rows rounded as packed records would keep them, written into pages of records, and read from them.
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

// One layer's pages in [items, layers, page bytes]: the elements of all entries of a page, then their scales.
template <class Byte>
struct RecordPages {
  Byte* base;  // at the layer
  int64_t item_stride, per_page;

  Byte* values(const Record& r, int64_t item, int64_t number) const {
    return base + item * item_stride + number * r.value_bytes();
  }
  Byte* scales(const Record& r, int64_t item, int64_t number) const {
    return base + item * item_stride + per_page * r.value_bytes() + number * r.scale_bytes();
  }
};

template <class T>
void write_records(const Record& r, const T* x, int64_t rows, const RecordPages<uint8_t>& pages, const int64_t* items,
                   const int64_t* numbers) {
#pragma omp parallel if (rows * r.dim > kSerial)
  {
    Floats row(r.dim);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      widen(x + i * r.dim, r.dim, row.data());
      encode_row(r, row.data(), pages.values(r, items[i], numbers[i]), pages.scales(r, items[i], numbers[i]));
    }
  }
}

template <class T>
void read_records(const Record& r, const RecordPages<const uint8_t>& pages, int64_t rows, const int64_t* items,
                  const int64_t* numbers, T* out) {
#pragma omp parallel if (rows * r.dim > kSerial)
  {
    Floats row(r.dim);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
      decode_row(r, pages.values(r, items[i], numbers[i]), pages.scales(r, items[i], numbers[i]), row.data());
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

HEADRACE_API void headrace_write_records(int is_bf16, const void* x, int64_t rows, uint8_t* pages, int64_t item_stride,
                                         int64_t per_page, const int64_t* items, const int64_t* numbers, int64_t dim,
                                         int64_t plain_dim, int64_t block, int64_t element_bits, int64_t padding,
                                         int scale, float smallest) {
  const Record record{dim, plain_dim, block, element_bits, padding, static_cast<Scale>(scale), smallest};
  const RecordPages<uint8_t> to{pages, item_stride, per_page};
  if (is_bf16)
    write_records(record, static_cast<const bf16*>(x), rows, to, items, numbers);
  else
    write_records(record, static_cast<const float*>(x), rows, to, items, numbers);
}

HEADRACE_API void headrace_read_records(int is_bf16, const uint8_t* pages, int64_t item_stride, int64_t per_page,
                                        int64_t rows, const int64_t* items, const int64_t* numbers, int64_t dim,
                                        int64_t plain_dim, int64_t block, int64_t element_bits, int64_t padding,
                                        int scale, float smallest, void* out) {
  const Record record{dim, plain_dim, block, element_bits, padding, static_cast<Scale>(scale), smallest};
  const RecordPages<const uint8_t> from{pages, item_stride, per_page};
  if (is_bf16)
    read_records(record, from, rows, items, numbers, static_cast<bf16*>(out));
  else
    read_records(record, from, rows, items, numbers, static_cast<float*>(out));
}
