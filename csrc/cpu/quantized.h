// How a quantised matrix is packed, and what reads it.
//
// A packed matrix is a row of panels of 16 output features; a panel is streamed along K in blocks of 32 columns:
//   8 bits   8 quads of columns, each [16][4] bytes
//   4 bits   4 times [16][4] bytes: quad i in the low halves, quad i + 4 in the high ones
// and then [32 / group][16] scales and, where the form has them, as many minima. Missing columns hold `zero`, missing
// features have scale and minimum 0.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr int kQuads = kQuantBlock / 4;

template <int kBits_, int kGroup_, bool kMins_, class Scale_>
struct Form {
    using Scale = Scale_;
    static constexpr int kBits = kBits_, kGroup = kGroup_;
    static constexpr bool kMins = kMins_;
    static constexpr int kGroups = kQuantBlock / kGroup;  // in a block
    static constexpr int64_t kQuadBytes = kLanes * 4;
    static constexpr int64_t kValueBytes = kLanes * kQuantBlock * kBits / 8;
    static constexpr int kNumScales = kMins ? 2 * kGroups : kGroups;  // and minima, behind them
    static constexpr int64_t kScaleBytes = kLanes * int64_t{sizeof(Scale)};
    static constexpr int64_t kBlockBytes = kValueBytes + kNumScales * kScaleBytes;
    // What needs no conversion, in whole lines of a cache.
    using Unpacked = Form<8, kGroup, kMins, float>;
};

OCTAVO_INLINE int64_t quant_blocks(int64_t num_cols) { return (num_cols + kQuantBlock - 1) / kQuantBlock; }

template <class F>
OCTAVO_INLINE IntVec load_quad(const uint8_t* block, int quad) {
    if constexpr (F::kBits == 8) return int_load(block + quad * F::kQuadBytes);
    const IntVec both = int_load(block + quad % (kQuads / 2) * F::kQuadBytes);
    return quad < kQuads / 2 ? low_nibbles(both) : high_nibbles(both);
}

template <class F>
OCTAVO_INLINE const typename F::Scale* scales_of(const uint8_t* block, int group) {
    return static_cast<const typename F::Scale*>(static_cast<const void*>(block + F::kValueBytes)) + group * kLanes;
}

template <class F>
OCTAVO_INLINE const typename F::Scale* mins_of(const uint8_t* block, int group) {
    return scales_of<F>(block, F::kGroups + group);
}

template <class F>
OCTAVO_INLINE void unpack_block(const uint8_t* block, uint8_t* out) {
    using U = typename F::Unpacked;
    for (int quad = 0; quad < kQuads; ++quad) int_store(out + quad * U::kQuadBytes, load_quad<F>(block, quad));
    float* scales = static_cast<float*>(static_cast<void*>(out + U::kValueBytes));
    for (int i = 0; i < F::kNumScales; ++i) store(scales + i * kLanes, load(scales_of<F>(block, i)));
}

// Calls fn with the Form for `form`.
template <int kBits, int kGroup, class Scale, class Fn>
OCTAVO_INLINE void with_mins(const QuantizedForm& form, const Fn& fn) {
    form.has_mins ? fn(Form<kBits, kGroup, true, Scale>{}) : fn(Form<kBits, kGroup, false, Scale>{});
}
template <int kBits, class Fn>
OCTAVO_INLINE void with_group(const QuantizedForm& form, const Fn& fn) {
    if (form.group == 16) return with_mins<kBits, 16, float>(form, fn);  // whose scales are wide
    form.wide_scales ? with_mins<kBits, 32, float>(form, fn) : with_mins<kBits, 32, f16>(form, fn);
}
template <class Fn>
OCTAVO_INLINE void with_form(const QuantizedForm& form, const Fn& fn) {
    form.bits == 4 ? with_group<4>(form, fn) : with_group<8>(form, fn);
}

}  // namespace octavo::OCTAVO_ISA
