// Sixteen float lanes, the same in every instruction set: kernels are written once over this file and compiled once for
// each. A lane's arithmetic is IEEE (fma rounds once, nothing is contracted or reordered), so all of them give the same
// bits. Everything is forced inline and lies in the instruction set's own namespace: nothing is left for a linker to
// merge.
#pragma once

#include "ops.h"
#include "thread_pool.h"

#if defined(OCTAVO_ISA_avx512bf16)  // VNNI, and dot products of bf16
#define OCTAVO_ISA_avx512vnni 1
#endif
#if defined(OCTAVO_ISA_avx512vnni)  // AVX-512 whose integer dot products are one instruction
#define OCTAVO_ISA_avx512 1
#endif

#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx2)
// gcc 12 warns of its own intrinsics, some of which begin with a register left as it is.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(OCTAVO_ISA_neon)
#include <arm_neon.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

// Before a loop of a few turns over registers. Plain C, whose lanes are loops already, would only grow.
#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx2) || defined(OCTAVO_ISA_neon)
#define OCTAVO_UNROLL _Pragma("GCC unroll 8")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace octavo::OCTAVO_ISA {

// Small elements as types of their own, so that loads and stores overload on them.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
// Sign, four bits of exponent, three of fraction: "e4m3fn", without infinities (Micikevicius et al., 2022).
struct f8 {
    uint8_t bits;
};

OCTAVO_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
OCTAVO_INLINE float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// Four bytes as they lie.
OCTAVO_INLINE int32_t bits_at(const void* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return bits;
}

#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx2)
// Lanes are added in a fixed tree: i with i + 8, then + 4, + 2, + 1; here its last steps.
OCTAVO_INLINE float reduce_add(__m256 a) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
OCTAVO_INLINE float reduce_max_bits(__m256i a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(most));
}
#endif

#if defined(OCTAVO_ISA_avx512)
#include "simd_avx512.h"
#elif defined(OCTAVO_ISA_avx2)
#include "simd_avx2.h"
#elif defined(OCTAVO_ISA_neon)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#endif

// Rounds to the nearest, ties to even. It serves every instruction set, since it is needed once a key only.
OCTAVO_INLINE void store(f8* p, Vec a) {
    float lane[kLanes];
    store(lane, a);
    for (int i = 0; i < int{kLanes}; ++i) {
        const uint32_t bits = bits_of(lane[i]), magnitude = bits & 0x7fffffff;
        const uint32_t normal = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
        const uint32_t subnormal = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
        p[i].bits = uint8_t((bits >> 24 & 0x80) | ((magnitude < 121u << 23 ? subnormal : normal) & 0x7f));
    }
}
OCTAVO_INLINE void store(int8_t* p, Vec a) { store_int8(p, a); }

// The first n lanes; the others are zero, and memory behind them is not touched.
template <class T>
OCTAVO_INLINE Vec load(const T* p, int64_t n) {
    if (n >= kLanes) return load(p);
    T buffer[kLanes] = {};
    __builtin_memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}
template <class T>
OCTAVO_INLINE void store(T* p, Vec a, int64_t n) {
    if (n >= kLanes) return store(p, a);
    T buffer[kLanes];
    store(buffer, a);
    __builtin_memcpy(p, buffer, n * sizeof(T));
}

// The largest lane, compared in the order of reduce_add.
OCTAVO_INLINE float reduce_max(Vec a) {
    float lane[kLanes];
    store(lane, a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

// e^r for x = n·ln 2 + r: a polynomial fitted for the least relative error, 4e-9.
OCTAVO_INLINE Vec exp_polynomial(Vec x, Vec n) {
    Vec r = fma(n, set1(-0x1.62e4p-1f), x);
    r = fma(n, set1(-0x1.7f7d1cp-20f), r);
    Vec p = set1(0x1.6a23d0p-10f);
    p = fma(p, r, set1(0x1.123a20p-7f));
    p = fma(p, r, set1(0x1.5558f2p-5f));
    p = fma(p, r, set1(0x1.555492p-3f));
    p = fma(p, r, set1(0x1.fffffcp-2f));
    return fma(mul(p, r), r, add(r, set1(1.0f)));
}
// e^x to about 1 ulp, scaled by 2^n in two steps so that both ends are reached: infinity above, zero below. NaN stays
// NaN.
OCTAVO_INLINE Vec exp(Vec x) {
    const Vec shift = set1(0x1.8p23f);  // adding it rounds to an integer, which then lies in the low bits
    x = min(set1(89.0f), max(set1(-104.0f), x));
    const Vec shifted = fma(x, set1(0x1.715476p+0f), shift);
    const Vec n = sub(shifted, shift);
    const Vec half_shifted = fma(n, set1(0.5f), shift);
    const Vec rest_shifted = add(sub(n, sub(half_shifted, shift)), shift);
    const Vec p = exp_polynomial(x, n);
    return mul(mul(p, pow2(half_shifted)), pow2(rest_shifted));
}

// The same as exp, for x up to 0: one step reaches the end, where what is left is flushed to 0.
OCTAVO_INLINE Vec exp_nonpositive(Vec x) {
    const Vec shift = set1(0x1.8p23f);
    x = max(set1(-88.0f), x);  // 2^-127 is 0 in `pow2`
    const Vec shifted = fma(x, set1(0x1.715476p+0f), shift);
    return mul(exp_polynomial(x, sub(shifted, shift)), pow2(shifted));
}

// Calls fn(unit) for each unit in [0, num_units), on the pool.
template <class Fn>
OCTAVO_INLINE void parallel(int64_t num_units, const Fn& fn) {
    parallel_for(
        num_units, [](const void* context, int64_t unit) noexcept { (*static_cast<const Fn*>(context))(unit); }, &fn);
}

// Calls fn(first, last) for ranges that make up [0, count), each of at least `grain`.
template <class Fn>
OCTAVO_INLINE void parallel_ranges(int64_t count, int64_t grain, const Fn& fn) {
    grain = grain < 1 ? 1 : grain;
    parallel((count + grain - 1) / grain, [&](int64_t unit) {
        const int64_t first = unit * grain, last = first + grain;
        fn(first, last < count ? last : count);
    });
}

// Calls fn with a pointer of the dtype's element type.
template <class Fn>
OCTAVO_INLINE void with_type(DType dtype, const void* p, const Fn& fn) {
    if (dtype == DType::f32) return fn(static_cast<const float*>(p));
    if (dtype == DType::bf16) return fn(static_cast<const bf16*>(p));
    return fn(static_cast<const f16*>(p));
}
template <class Fn>
OCTAVO_INLINE void with_type(DType dtype, void* p, const Fn& fn) {
    if (dtype == DType::f32) return fn(static_cast<float*>(p));
    if (dtype == DType::bf16) return fn(static_cast<bf16*>(p));
    return fn(static_cast<f16*>(p));
}
template <class T>
OCTAVO_INLINE const T* as_type_of(const T*, const void* p) {
    return static_cast<const T*>(p);
}

static_assert(kTileRows <= kMaxTileRows && kInt8Rows <= kMaxInt8Rows && kQueryRows <= kAttentionRows);

}  // namespace octavo::OCTAVO_ISA
