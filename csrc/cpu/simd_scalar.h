// The sixteen lanes of simd.h in plain C: the twin that every other instruction set must equal bit for bit. Included
// there, inside its namespace.

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
