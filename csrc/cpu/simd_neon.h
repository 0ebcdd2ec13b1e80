// The sixteen lanes of simd.h as four NEON registers. Included there, inside its namespace. Keeps to what aarch64 had
// at first, so that every such CPU runs it.

struct Vec {
    float32x4_t quarter[4];
};
struct IntVec {
    int32x4_t quarter[4];
};
constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;
constexpr int kNarrowPanels = 2;
constexpr int kQueryRows = 4;
constexpr int kInt8Rows = 2;
constexpr int kInt8Panels = 1;

// The expression for each quarter i, which is a constant there, so that quarters stay in registers.
#define OCTAVO_QUARTERS(EXPRESSION)                                                     \
    const auto at = [&](int i) __attribute__((always_inline)) { return (EXPRESSION); }; \
    return {{at(0), at(1), at(2), at(3)}}

OCTAVO_INLINE uint32x4_t bits_of(float32x4_t a) { return vreinterpretq_u32_f32(a); }
OCTAVO_INLINE float32x4_t float_of(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }

OCTAVO_INLINE Vec set1(float x) { OCTAVO_QUARTERS((void(i), vdupq_n_f32(x))); }
OCTAVO_INLINE Vec add(Vec a, Vec b) { OCTAVO_QUARTERS(vaddq_f32(a.quarter[i], b.quarter[i])); }
OCTAVO_INLINE Vec sub(Vec a, Vec b) { OCTAVO_QUARTERS(vsubq_f32(a.quarter[i], b.quarter[i])); }
OCTAVO_INLINE Vec mul(Vec a, Vec b) { OCTAVO_QUARTERS(vmulq_f32(a.quarter[i], b.quarter[i])); }
OCTAVO_INLINE Vec div(Vec a, Vec b) { OCTAVO_QUARTERS(vdivq_f32(a.quarter[i], b.quarter[i])); }
// Not vmaxq and vminq, which give NaN where either operand is one.
OCTAVO_INLINE Vec max(Vec a, Vec b) {
    OCTAVO_QUARTERS(vbslq_f32(vcgtq_f32(a.quarter[i], b.quarter[i]), a.quarter[i], b.quarter[i]));
}
OCTAVO_INLINE Vec min(Vec a, Vec b) {
    OCTAVO_QUARTERS(vbslq_f32(vcltq_f32(a.quarter[i], b.quarter[i]), a.quarter[i], b.quarter[i]));
}
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
    OCTAVO_QUARTERS(vfmaq_f32(c.quarter[i], a.quarter[i], b.quarter[i]));
}
OCTAVO_INLINE Vec pow2(Vec shifted) {
    OCTAVO_QUARTERS(float_of(vshlq_n_u32(vaddq_u32(bits_of(shifted.quarter[i]), vdupq_n_u32(127)), 23)));
}

OCTAVO_INLINE uint16x4_t load_words(const void* p, int i) {
    return vld1_u16(static_cast<const uint16_t*>(p) + 4 * i);
}
OCTAVO_INLINE Vec load(const float* p) { OCTAVO_QUARTERS(vld1q_f32(p + 4 * i)); }
OCTAVO_INLINE Vec load(const bf16* p) { OCTAVO_QUARTERS(float_of(vshll_n_u16(load_words(p, i), 16))); }
OCTAVO_INLINE float32x4_t widen(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
OCTAVO_INLINE Vec load(const f16* p) { OCTAVO_QUARTERS(widen(load_words(p, i))); }
// Its exponent and fraction in their places of a half, whose exponent is biased by 8 more.
OCTAVO_INLINE uint16x8_t as_halves(uint8x8_t bytes) {
    const int16x8_t shifted = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(bytes)), 7);
    return vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbfff));
}
OCTAVO_INLINE Vec load(const f8* p) {
    const uint16x8_t low = as_halves(vld1_u8(&p->bits)), high = as_halves(vld1_u8(&p->bits + 8));
    const Vec small = {{widen(vget_low_u16(low)), widen(vget_high_u16(low)), widen(vget_low_u16(high)),
                        widen(vget_high_u16(high))}};
    return mul(small, set1(256.0f));
}
OCTAVO_INLINE void store(float* p, Vec a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.quarter[i]);
}
OCTAVO_INLINE void store_words(void* p, int i, uint16x4_t words) { vst1_u16(static_cast<uint16_t*>(p) + 4 * i, words); }
OCTAVO_INLINE void store(bf16* p, Vec a) {
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t bits = bits_of(a.quarter[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        const uint32x4_t is_number = vceqq_f32(a.quarter[i], a.quarter[i]);
        store_words(p, i, vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16));
    }
}
OCTAVO_INLINE void store(f16* p, Vec a) {
    for (int i = 0; i < 4; ++i) store_words(p, i, vreinterpret_u16_f16(vcvt_f16_f32(a.quarter[i])));
}

OCTAVO_INLINE IntVec int_set1(int32_t x) { OCTAVO_QUARTERS((void(i), vdupq_n_s32(x))); }
OCTAVO_INLINE IntVec int_load(const uint8_t* p) { OCTAVO_QUARTERS(vreinterpretq_s32_u8(vld1q_u8(p + 16 * i))); }
OCTAVO_INLINE void int_store(uint8_t* p, IntVec a) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vreinterpretq_u8_s32(a.quarter[i]));
}
OCTAVO_INLINE IntVec low_nibbles(IntVec a) { OCTAVO_QUARTERS(vandq_s32(a.quarter[i], vdupq_n_s32(0x0f0f0f0f))); }
OCTAVO_INLINE IntVec high_nibbles(IntVec a) {
    OCTAVO_QUARTERS(vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a.quarter[i]), 4)));
}
OCTAVO_INLINE IntVec byte_of(IntVec a, int j) {
    OCTAVO_QUARTERS(vandq_s32(vshlq_s32(a.quarter[i], vdupq_n_s32(-8 * j)), vdupq_n_s32(255)));
}
OCTAVO_INLINE Vec to_float(IntVec a) { OCTAVO_QUARTERS(vcvtq_f32_s32(a.quarter[i])); }
OCTAVO_INLINE Vec as_float(IntVec a) { OCTAVO_QUARTERS(vreinterpretq_f32_s32(a.quarter[i])); }

// Sixteen integers below 2^15 as words; NaN is 0.
struct Words {
    int16x8_t low, high;
};
OCTAVO_INLINE Words to_words(Vec a) {
    const auto at = [&](int i) { return vmovn_s32(vcvtq_s32_f32(a.quarter[i])); };
    return {vcombine_s16(at(0), at(1)), vcombine_s16(at(2), at(3))};
}
OCTAVO_INLINE void store_int8(int8_t* p, Vec a) {
    const Words words = to_words(a);
    vst1q_s8(p, vcombine_s8(vmovn_s16(words.low), vmovn_s16(words.high)));
}
OCTAVO_INLINE void store_int16(int16_t* p, Vec a) {
    const Words words = to_words(a);
    vst1q_s16(p, words.low);
    vst1q_s16(p + 8, words.high);
}
OCTAVO_INLINE IntVec load_pairs(const int8_t* p) {
    OCTAVO_QUARTERS(vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p + 8 * i))));
}
OCTAVO_INLINE int32x4_t dot2_quarter(int32x4_t sum, int32x4_t pairs, const int16_t* values) {
    sum = vmlaq_n_s32(sum, vshrq_n_s32(vshlq_n_s32(pairs, 16), 16), values[0]);
    return vmlaq_n_s32(sum, vshrq_n_s32(pairs, 16), values[1]);
}
OCTAVO_INLINE IntVec dot2(IntVec sum, IntVec pairs, const int16_t* values) {
    OCTAVO_QUARTERS(dot2_quarter(sum.quarter[i], pairs.quarter[i], values));
}
// A product of an unsigned and a signed byte fits 16 bits; those of even and of odd bytes are added in pairs.
OCTAVO_INLINE int32x4_t dot4_quarter(int32x4_t sum, int16x8_t weight, int16x8_t values) {
    const int16x8_t even = vandq_s16(weight, vdupq_n_s16(0xff));
    const int16x8_t odd = vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s16(weight), 8));
    sum = vpadalq_s16(sum, vmulq_s16(even, vshrq_n_s16(vshlq_n_s16(values, 8), 8)));
    return vpadalq_s16(sum, vmulq_s16(odd, vshrq_n_s16(values, 8)));
}
OCTAVO_INLINE IntVec dot4(IntVec sum, IntVec weight, const int8_t* values) {
    const int16x8_t all = vreinterpretq_s16_s32(vdupq_n_s32(bits_at(values)));
    OCTAVO_QUARTERS(dot4_quarter(sum.quarter[i], vreinterpretq_s16_s32(weight.quarter[i]), all));
}
OCTAVO_INLINE float reduce_add(Vec a) {
    const float32x4_t sum = vaddq_f32(vaddq_f32(a.quarter[0], a.quarter[2]), vaddq_f32(a.quarter[1], a.quarter[3]));
    const float32x2_t both = vadd_f32(vget_low_f32(sum), vget_high_f32(sum));
    return vget_lane_f32(both, 0) + vget_lane_f32(both, 1);
}
OCTAVO_INLINE float reduce_max_magnitude(Vec a, Vec b) {
    uint32x4_t most = vdupq_n_u32(0);
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t either = vmaxq_u32(bits_of(vabsq_f32(a.quarter[i])), bits_of(vabsq_f32(b.quarter[i])));
        most = vmaxq_u32(most, either);
    }
    return float_of(vmaxvq_u32(most));
}
OCTAVO_INLINE uint32x4_t load_pairs(const bf16* p, int i) {
    return vreinterpretq_u32_u16(vld1q_u16(&p->bits + 8 * i));
}
OCTAVO_INLINE Vec load_first(const bf16* p) { OCTAVO_QUARTERS(float_of(vshlq_n_u32(load_pairs(p, i), 16))); }
OCTAVO_INLINE Vec load_second(const bf16* p) {
    OCTAVO_QUARTERS(float_of(vandq_u32(load_pairs(p, i), vdupq_n_u32(0xffff0000))));
}

#undef OCTAVO_QUARTERS
