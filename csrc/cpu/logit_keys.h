// Logits as integers that are ordered as the floats are, so that plain loops over them become vector instructions.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr int32_t kLowest = INT32_MIN, kInfinity = 0x7f800000, kNegativeInfinity = int32_t(0xff800000);

// The two zeros are equal.
OCTAVO_INLINE int32_t key_of(int32_t bits) {
    bits = bits == kLowest ? 0 : bits;
    return bits ^ (bits >> 31 & 0x7fffffff);
}

OCTAVO_INLINE bool is_nan(int32_t bits) { return (bits & 0x7fffffff) > kInfinity; }

}  // namespace octavo::OCTAVO_ISA
