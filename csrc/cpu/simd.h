// Sixteen float lanes, the same in every instruction set: kernels are written once over this file and compiled once for
// each. A lane's arithmetic is IEEE (fma rounds once, nothing is contracted or reordered), so all of them give the same
// bits. Everything is forced inline and lies in the instruction set's own namespace: nothing is left for a linker to
// merge.
#pragma once

#include "ops.h"
#include "thread_pool.h"

#if defined(OCTAVO_ISA_avx512vnni)  // AVX-512 whose integer dot products are one instruction
#define OCTAVO_ISA_avx512 1
#endif

#if defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx2)
#include <immintrin.h>
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

using Vec = __m512;
constexpr int kTileRows = 8;      // rows of a register tile of linear
constexpr int kTilePanels = 3;    // panels of it
constexpr int kNarrowPanels = 4;  // panels for one or two rows, which need more chains to hide the latency of fma
constexpr int kQueryRows = 8;     // rows of a register tile of attention

OCTAVO_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
OCTAVO_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
OCTAVO_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
OCTAVO_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
OCTAVO_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
OCTAVO_INLINE Vec pow2(Vec shifted) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
OCTAVO_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
OCTAVO_INLINE Vec load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
OCTAVO_INLINE Vec load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// Its exponent and fraction in their places of a half, whose exponent is biased by 8 more.
OCTAVO_INLINE Vec load(const f8* p) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return mul(_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)))), set1(256.0f));
}
OCTAVO_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
OCTAVO_INLINE void store(bf16* p, Vec a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
OCTAVO_INLINE void store(f16* p, Vec a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
// Sixteen 32-bit integers, or sixteen quads of bytes.
using IntVec = __m512i;
constexpr int kInt8Rows = 6;    // rows of a register tile of eight-bit activations
constexpr int kInt8Panels = 2;  // panels of it

OCTAVO_INLINE IntVec int_set1(int32_t x) { return _mm512_set1_epi32(x); }
OCTAVO_INLINE IntVec int_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
OCTAVO_INLINE void int_store(uint8_t* p, IntVec a) { _mm512_storeu_si512(p, a); }
OCTAVO_INLINE IntVec low_nibbles(IntVec a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
OCTAVO_INLINE IntVec high_nibbles(IntVec a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
OCTAVO_INLINE IntVec byte_of(IntVec a, int i) {
    return _mm512_and_si512(_mm512_srli_epi32(a, 8 * i), _mm512_set1_epi32(255));
}
OCTAVO_INLINE Vec to_float(IntVec a) { return _mm512_cvtepi32_ps(a); }
OCTAVO_INLINE Vec as_float(IntVec a) { return _mm512_castsi512_ps(a); }
OCTAVO_INLINE void store_int8(int8_t* p, Vec a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
OCTAVO_INLINE void store_int16(int16_t* p, Vec a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
// Sixteen pairs of bytes, widened.
OCTAVO_INLINE IntVec load_pairs(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
// sum plus, in each lane, a pair times the same two values.
OCTAVO_INLINE IntVec dot2(IntVec sum, IntVec pairs, const int16_t* values) {
#if defined(OCTAVO_ISA_avx512vnni)
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(pairs), "m"(*(const int32_t(*))values));
    return sum;
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi32(bits_at(values))));
#endif
}
OCTAVO_INLINE float reduce_add(Vec a) {
    return reduce_add(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}
// The largest magnitude of all lanes; infinite or NaN where one is.
OCTAVO_INLINE float reduce_max_magnitude(Vec a, Vec b) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const __m512i bits_a = _mm512_and_si512(_mm512_castps_si512(a), mask);
    const __m512i bits = _mm512_max_epi32(bits_a, _mm512_and_si512(_mm512_castps_si512(b), mask));
    return reduce_max_bits(_mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1)));
}
// sum plus, in each lane, four unsigned bytes times the same four values.
OCTAVO_INLINE IntVec dot4(IntVec sum, IntVec weight, const int8_t* values) {
#if defined(OCTAVO_ISA_avx512vnni)
    // Written out, since gcc 12 copies the accumulator around the intrinsic.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*(const int32_t(*))values));
    return sum;
#else
    const __m512i even = _mm512_and_si512(weight, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(weight, 8);
    const __m512i all = _mm512_set1_epi32(bits_at(values));
    const __m512i even_values = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8);
    const __m512i odd_values = _mm512_srai_epi16(all, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, even_values));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, odd_values));
#endif
}
// Of sixteen pairs, the first or the second of each.
OCTAVO_INLINE Vec load_first(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
OCTAVO_INLINE Vec load_second(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)));
}

#elif defined(OCTAVO_ISA_avx2)

struct Vec {
    __m256 low, high;
};
constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;
constexpr int kNarrowPanels = 2;
constexpr int kQueryRows = 4;

OCTAVO_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
OCTAVO_INLINE __m256 pow2_half(__m256 shifted) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
OCTAVO_INLINE Vec pow2(Vec shifted) { return {pow2_half(shifted.low), pow2_half(shifted.high)}; }
OCTAVO_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE __m256 load_half(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
OCTAVO_INLINE Vec load(const bf16* p) { return {load_half(p), load_half(p + 8)}; }
OCTAVO_INLINE Vec load(const f16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
OCTAVO_INLINE Vec load(const f8* p) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)));
    return mul({_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))},
               set1(256.0f));
}
OCTAVO_INLINE void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
OCTAVO_INLINE __m256i round_half(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
OCTAVO_INLINE void store(bf16* p, Vec a) {
    const __m256i mixed = _mm256_packus_epi32(round_half(a.low), round_half(a.high));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
OCTAVO_INLINE void store(f16* p, Vec a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
struct IntVec {
    __m256i low, high;
};
constexpr int kInt8Rows = 2;
constexpr int kInt8Panels = 1;

OCTAVO_INLINE IntVec int_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE IntVec int_load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
OCTAVO_INLINE void int_store(uint8_t* p, IntVec a) {
    _mm256_storeu_si256((__m256i*)p, a.low);
    _mm256_storeu_si256((__m256i*)(p + 32), a.high);
}
OCTAVO_INLINE __m256i low_nibbles(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
OCTAVO_INLINE __m256i high_nibbles(__m256i a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
OCTAVO_INLINE __m256i byte_of(__m256i a, int i) {
    return _mm256_and_si256(_mm256_srli_epi32(a, 8 * i), _mm256_set1_epi32(255));
}
OCTAVO_INLINE IntVec low_nibbles(IntVec a) { return {low_nibbles(a.low), low_nibbles(a.high)}; }
OCTAVO_INLINE IntVec high_nibbles(IntVec a) { return {high_nibbles(a.low), high_nibbles(a.high)}; }
OCTAVO_INLINE IntVec byte_of(IntVec a, int i) { return {byte_of(a.low, i), byte_of(a.high, i)}; }
OCTAVO_INLINE Vec to_float(IntVec a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
OCTAVO_INLINE Vec as_float(IntVec a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
OCTAVO_INLINE void store_int8(int8_t* p, Vec a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
OCTAVO_INLINE void store_int16(int16_t* p, Vec a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
}
OCTAVO_INLINE IntVec load_pairs(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
OCTAVO_INLINE IntVec dot2(IntVec sum, IntVec pairs, const int16_t* values) {
    const __m256i both = _mm256_set1_epi32(bits_at(values));
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(pairs.low, both)),
            _mm256_add_epi32(sum.high, _mm256_madd_epi16(pairs.high, both))};
}
OCTAVO_INLINE float reduce_add(Vec a) { return reduce_add(_mm256_add_ps(a.low, a.high)); }
OCTAVO_INLINE __m256i magnitude_bits(__m256 a, __m256 b) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff), bits_a = _mm256_and_si256(_mm256_castps_si256(a), mask);
    return _mm256_max_epi32(bits_a, _mm256_and_si256(_mm256_castps_si256(b), mask));
}
OCTAVO_INLINE float reduce_max_magnitude(Vec a, Vec b) {
    return reduce_max_bits(_mm256_max_epi32(magnitude_bits(a.low, b.low), magnitude_bits(a.high, b.high)));
}
OCTAVO_INLINE __m256i dot4_half(__m256i sum, __m256i weight, __m256i all) {
    const __m256i even = _mm256_and_si256(weight, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(weight, 8);
    const __m256i even_values = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd_values = _mm256_srai_epi16(all, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, even_values));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, odd_values));
}
OCTAVO_INLINE IntVec dot4(IntVec sum, IntVec weight, const int8_t* values) {
    const __m256i all = _mm256_set1_epi32(bits_at(values));
    return {dot4_half(sum.low, weight.low, all), dot4_half(sum.high, weight.high, all)};
}
OCTAVO_INLINE __m256 first_half(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
OCTAVO_INLINE __m256 second_half(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(0xffff0000)));
}
OCTAVO_INLINE Vec load_first(const bf16* p) { return {first_half(p), first_half(p + 16)}; }
OCTAVO_INLINE Vec load_second(const bf16* p) { return {second_half(p), second_half(p + 16)}; }

#elif defined(OCTAVO_ISA_neon)
#include "simd_neon.h"

#else  // plain C: the twin that every other instruction set must equal bit for bit

struct Vec {
    float lane[kLanes];
};
constexpr int kTileRows = 4;
constexpr int kTilePanels = 1;
constexpr int kNarrowPanels = 1;
constexpr int kQueryRows = 4;

#define OCTAVO_LANES(EXPRESSION)                                    \
    Vec r;                                                          \
    for (int i = 0; i < int{kLanes}; ++i) r.lane[i] = (EXPRESSION); \
    return r

OCTAVO_INLINE Vec set1(float x) { OCTAVO_LANES(x); }
OCTAVO_INLINE Vec add(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] + b.lane[i]); }
OCTAVO_INLINE Vec sub(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] - b.lane[i]); }
OCTAVO_INLINE Vec mul(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] * b.lane[i]); }
OCTAVO_INLINE Vec div(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] / b.lane[i]); }
// As x86 does it: the second operand where either is NaN.
OCTAVO_INLINE Vec max(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { OCTAVO_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { OCTAVO_LANES(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
OCTAVO_INLINE Vec pow2(Vec shifted) { OCTAVO_LANES(float_of((bits_of(shifted.lane[i]) + 127) << 23)); }

// Conversions of half precision in integers, since subnormal halves are normal floats but flushed denormals are not.
OCTAVO_INLINE float widen(f16 h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, exponent = (h.bits >> 10) & 31, mantissa = h.bits & 1023;
    if (exponent == 0) return float_of(bits_of(float(mantissa) * 0x1p-24f) | sign);
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}
OCTAVO_INLINE f16 narrow(float x) {
    const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 0x1ff))};
    if (magnitude >= 0x47800000) return {uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) return {uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13))};
}
OCTAVO_INLINE Vec load(const float* p) { OCTAVO_LANES(p[i]); }
OCTAVO_INLINE Vec load(const bf16* p) { OCTAVO_LANES(float_of(uint32_t(p[i].bits) << 16)); }
OCTAVO_INLINE Vec load(const f16* p) { OCTAVO_LANES(widen(p[i])); }
OCTAVO_INLINE Vec load(const f8* p) {
    OCTAVO_LANES(widen(f16{uint16_t((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7)}) * 256.0f);
}
OCTAVO_INLINE void store(float* p, Vec a) {
    for (int i = 0; i < int{kLanes}; ++i) p[i] = a.lane[i];
}
OCTAVO_INLINE void store(bf16* p, Vec a) {
    for (int i = 0; i < int{kLanes}; ++i) {
        const uint32_t bits = bits_of(a.lane[i]);
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        p[i].bits = uint16_t((is_nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}
OCTAVO_INLINE void store(f16* p, Vec a) {
    for (int i = 0; i < int{kLanes}; ++i) p[i] = narrow(a.lane[i]);
}
struct IntVec {
    int32_t lane[kLanes];
};
constexpr int kInt8Rows = 1;
constexpr int kInt8Panels = 1;

#define OCTAVO_INT_LANES(EXPRESSION)                                \
    IntVec r;                                                       \
    for (int i = 0; i < int{kLanes}; ++i) r.lane[i] = (EXPRESSION); \
    return r

OCTAVO_INLINE IntVec int_set1(int32_t x) { OCTAVO_INT_LANES(x); }
OCTAVO_INLINE IntVec int_load(const uint8_t* p) {
    IntVec r;
    __builtin_memcpy(r.lane, p, sizeof(r.lane));
    return r;
}
OCTAVO_INLINE void int_store(uint8_t* p, IntVec a) { __builtin_memcpy(p, a.lane, sizeof(a.lane)); }
OCTAVO_INLINE IntVec low_nibbles(IntVec a) { OCTAVO_INT_LANES(a.lane[i] & 0x0f0f0f0f); }
OCTAVO_INLINE IntVec high_nibbles(IntVec a) { OCTAVO_INT_LANES((a.lane[i] >> 4) & 0x0f0f0f0f); }
OCTAVO_INLINE IntVec byte_of(IntVec a, int j) { OCTAVO_INT_LANES((a.lane[i] >> 8 * j) & 255); }
OCTAVO_INLINE Vec to_float(IntVec a) { OCTAVO_LANES(float(a.lane[i])); }
OCTAVO_INLINE Vec as_float(IntVec a) { OCTAVO_LANES(float_of(uint32_t(a.lane[i]))); }
OCTAVO_INLINE void store_int8(int8_t* p, Vec a) {
    for (int i = 0; i < int{kLanes}; ++i) p[i] = a.lane[i] == a.lane[i] ? int8_t(a.lane[i]) : int8_t{};
}
OCTAVO_INLINE void store_int16(int16_t* p, Vec a) {
    for (int i = 0; i < int{kLanes}; ++i) p[i] = a.lane[i] == a.lane[i] ? int16_t(a.lane[i]) : int16_t{};
}
OCTAVO_INLINE IntVec load_pairs(const int8_t* p) {
    IntVec r;
    for (int i = 0; i < int{kLanes}; ++i) r.lane[i] = int32_t(uint32_t(p[2 * i + 1]) << 16 | uint16_t(p[2 * i]));
    return r;
}
OCTAVO_INLINE IntVec dot2(IntVec sum, IntVec pairs, const int16_t* values) {
    for (int i = 0; i < int{kLanes}; ++i)
        sum.lane[i] += int16_t(pairs.lane[i]) * values[0] + (pairs.lane[i] >> 16) * values[1];
    return sum;
}
OCTAVO_INLINE float reduce_add(Vec a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
    return a.lane[0];
}
OCTAVO_INLINE float reduce_max_magnitude(Vec a, Vec b) {
    uint32_t most = 0;
    for (int i = 0; i < int{kLanes}; ++i)
        for (int j = 0; j < 2; ++j) {
            const uint32_t magnitude = bits_of(j ? b.lane[i] : a.lane[i]) & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
    return float_of(most);
}
OCTAVO_INLINE IntVec dot4(IntVec sum, IntVec weight, const int8_t* values) {
    for (int i = 0; i < int{kLanes}; ++i)
        for (int j = 0; j < 4; ++j) sum.lane[i] += ((weight.lane[i] >> 8 * j) & 255) * values[j];
    return sum;
}
OCTAVO_INLINE Vec load_first(const bf16* p) { OCTAVO_LANES(float_of(uint32_t(p[2 * i].bits) << 16)); }
OCTAVO_INLINE Vec load_second(const bf16* p) { OCTAVO_LANES(float_of(uint32_t(p[2 * i + 1].bits) << 16)); }

#endif

// To the nearest, ties to even. Written for any instruction set, since it is needed once a key only.
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

// As exp, for x up to 0: one step reaches the end, where what is left is flushed to 0.
OCTAVO_INLINE Vec exp_nonpositive(Vec x) {
    const Vec shift = set1(0x1.8p23f);
    x = max(set1(-88.0f), x);  // 2^-127 is 0 in `pow2`
    const Vec shifted = fma(x, set1(0x1.715476p+0f), shift);
    return mul(exp_polynomial(x, sub(shifted, shift)), pow2(shifted));
}

// fn(unit) for each unit in [0, num_units), on the pool.
template <class Fn>
OCTAVO_INLINE void parallel(int64_t num_units, const Fn& fn) {
    parallel_for(
        num_units, [](const void* context, int64_t unit) noexcept { (*static_cast<const Fn*>(context))(unit); }, &fn);
}

// fn(first, last) over ranges of [0, count) of at least `grain`.
template <class Fn>
OCTAVO_INLINE void parallel_ranges(int64_t count, int64_t grain, const Fn& fn) {
    grain = grain < 1 ? 1 : grain;
    parallel((count + grain - 1) / grain, [&](int64_t unit) {
        const int64_t first = unit * grain, last = first + grain;
        fn(first, last < count ? last : count);
    });
}

// fn(pointer of the dtype's element type).
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
