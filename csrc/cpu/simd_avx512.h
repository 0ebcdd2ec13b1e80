// The sixteen lanes of simd.h as one AVX-512 register, with VNNI and BF16 or without. Included there, inside its namespace.

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
#if defined(OCTAVO_ISA_avx512bf16)
OCTAVO_INLINE IntVec load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
// sum plus, in each lane, a pair of bf16 times another: two multiply-adds, the second numbers' first, which flush
// denormals as ours do.
OCTAVO_INLINE Vec dot2(Vec sum, IntVec pairs, IntVec values) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(values));
    return sum;
}
#endif
