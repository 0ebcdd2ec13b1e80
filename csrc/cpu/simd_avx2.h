// The sixteen lanes of simd.h as two AVX2 registers. Included there, inside its namespace.

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
