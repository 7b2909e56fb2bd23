// One entry to its packed record and back (formats: kv/records.py): blocks of e4m3 or e2m1 numbers with a scale each,
// the last dims in bf16.
#pragma once

#include "common.h"

namespace headrace {

enum class Scale : int { kUe8m0, kE4m3, kFp32 };

struct Record {
  int64_t dim, plain_dim, block, element_bits, padding;
  Scale scale;
  float smallest;  // largest magnitudes of a block below this count as this

  int64_t quantized() const { return dim - plain_dim; }
  int64_t value_bytes() const { return quantized() * element_bits / 8 + 2 * plain_dim; }
  int64_t scale_bytes() const {
    return (quantized() + block - 1) / block * (scale == Scale::kFp32 ? 4 : 1) + padding;
  }
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr int64_t kHalves = 32;  // 4-bit numbers that are taken apart at a time
constexpr uint32_t kInfinity = 0x7f800000u;

// Nearest e4m3, ties to even, of a magnitude up to 448. Below 2^-6 the steps are 2^-9, which is what adding 2^14 rounds
// to; above, the fraction's last 20 bits go.
inline uint32_t e4m3_code(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  return (magnitude < 0x3c800000u ? small : normal) | (bits >> 31 << 7);
}

inline float e4m3_value(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float small = float_of((magnitude << 20) + (121u << 23)) - 0.015625f;
  const float value = magnitude < 8u ? small : float_of((magnitude << 20) + (120u << 23));
  return float_of(bits_of(value) | (code & 0x80u) << 24);
}

// Nearest e2m1, of two equally near ones the even code, of a magnitude up to 6.
inline uint32_t e2m1_code(float x) {
  const float m = std::fabs(x);
  const uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return code | (bits_of(x) >> 31 << 3);
}

inline float e2m1_value(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float value = magnitude < 2u ? 0.5f * static_cast<float>(magnitude)
                                     : float_of(((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22);
  return float_of(bits_of(value) | (code & 8u) << 28);
}

// The scale of a block whose largest magnitude is `largest` of the element type's: written to `stored`, and its value.
inline float make_scale(const Record& r, float magnitude, float largest, uint8_t* stored) {
  const bool finite = bits_of(magnitude) < kInfinity;
  const float wanted = std::max(magnitude, r.smallest) / largest;
  float factor = wanted;
  if (r.scale == Scale::kUe8m0) {
    const uint32_t exponent = (bits_of(wanted) >> 23) + ((bits_of(wanted) & 0x7fffffu) != 0);
    *stored = static_cast<uint8_t>(finite ? exponent : 255u);
    factor = float_of(exponent << 23);
  } else if (r.scale == Scale::kE4m3) {
    const uint32_t code = e4m3_code(std::min(wanted, 448.0f));
    *stored = static_cast<uint8_t>(finite ? code : 0x7fu);
    factor = e4m3_value(code);
  } else {
    const uint32_t bits = finite ? bits_of(wanted) : 0x7fc00000u;
    std::memcpy(stored, &bits, sizeof bits);
  }
  return finite ? factor : NAN;
}

inline float read_scale(const Record& r, const uint8_t* stored) {
  if (r.scale == Scale::kUe8m0) return *stored == 255 ? NAN : *stored ? float_of(uint32_t{*stored} << 23) : 0x1p-127f;
  if (r.scale == Scale::kE4m3) return (*stored & 0x7f) == 0x7f ? NAN : e4m3_value(*stored);
  float value;
  std::memcpy(&value, stored, sizeof value);
  return value;
}

// x [dim] -> values [value_bytes], scales [scale_bytes].
inline void encode_row(const Record& r, const float* x, uint8_t* values, uint8_t* scales) {
  const float largest = r.element_bits == 8 ? 448.0f : 6.0f;
  const int64_t scale_size = r.scale == Scale::kFp32 ? 4 : 1;
  uint8_t* stored = scales;
  for (int64_t first = 0; first < r.quantized(); first += r.block, stored += scale_size) {
    const int64_t num = std::min(r.block, r.quantized() - first);
    uint32_t top = 0;  // as bits, what is not finite is above all that is
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < num; ++i) top = std::max(top, bits_of(x[first + i]) & 0x7fffffffu);
    const float factor = make_scale(r, float_of(top), largest, stored);
    if (top >= kInfinity) {
      std::memset(values + first * r.element_bits / 8, 0, num * r.element_bits / 8);
      continue;
    }
    const auto scaled = [&](int64_t i) { return std::max(-largest, std::min(largest, x[first + i] / factor)); };
    if (r.element_bits == 8) {
#pragma omp simd
      for (int64_t i = 0; i < num; ++i) values[first + i] = static_cast<uint8_t>(e4m3_code(scaled(i)));
    } else {
      for (int64_t done = 0; done < num; done += kHalves) {  // one number to a byte first: that is vectorised
        uint8_t halves[kHalves];
        const int64_t count = std::min(kHalves, num - done);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) halves[i] = static_cast<uint8_t>(e2m1_code(scaled(done + i)));
        uint8_t* to = values + (first + done) / 2;
        for (int64_t i = 0; i < count / 2; ++i) to[i] = static_cast<uint8_t>(halves[2 * i] | halves[2 * i + 1] << 4);
      }
    }
  }
  std::memset(stored, 0, r.padding);
  uint8_t* plain = values + r.quantized() * r.element_bits / 8;
  for (int64_t i = 0; i < r.plain_dim; ++i) {
    bf16 value;
    store(&value, x[r.quantized() + i]);
    std::memcpy(plain + 2 * i, &value, sizeof value);
  }
}

// values [value_bytes], scales [scale_bytes] -> x [dim].
inline void decode_row(const Record& r, const uint8_t* values, const uint8_t* scales, float* x) {
  const int64_t scale_size = r.scale == Scale::kFp32 ? 4 : 1;
  for (int64_t first = 0; first < r.quantized(); first += r.block, scales += scale_size) {
    const int64_t num = std::min(r.block, r.quantized() - first);
    const float factor = read_scale(r, scales);
    float* out = x + first;
    if (r.element_bits == 8) {
      const uint8_t* codes = values + first;
#pragma omp simd
      for (int64_t i = 0; i < num; ++i) out[i] = e4m3_value(codes[i]) * factor;
    } else {
      for (int64_t done = 0; done < num; done += kHalves) {
        uint8_t halves[kHalves];
        const int64_t count = std::min(kHalves, num - done);
        const uint8_t* codes = values + (first + done) / 2;
        for (int64_t i = 0; i < count / 2; ++i) halves[2 * i] = codes[i] & 15, halves[2 * i + 1] = codes[i] >> 4;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[done + i] = e2m1_value(halves[i]) * factor;
      }
    }
  }
  const uint8_t* plain = values + r.quantized() * r.element_bits / 8;
  for (int64_t i = 0; i < r.plain_dim; ++i) {
    bf16 value;
    std::memcpy(&value, plain + 2 * i, sizeof value);
    x[r.quantized() + i] = to_float(value);
  }
}

// x [dim] as it comes back from a record. scratch has room for one.
inline void round_row(const Record& r, float* x, uint8_t* scratch) {
  encode_row(r, x, scratch, scratch + r.value_bytes());
  decode_row(r, scratch, scratch + r.value_bytes(), x);
}

}  // namespace headrace
