// FP4 as checkpoints store it: two e2m1 a byte, the low half first, and a power of two (ue8m0) for 32 in a row.
#pragma once

#include "common.h"

namespace headrace {

constexpr int64_t kFp4Row = 32;  // elements that share a scale
alignas(64) constexpr float kFp4[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace headrace
