// 8-bit weights in groups of 32 columns times activations that are quantised here, a group at a time.
//
// A packed matrix is a row of panels of 16 output features; a panel is streamed along K, a group of 32 columns by
// another: 8 times [16][4] weights + 128 as unsigned bytes, then 16 scales as float32. Missing columns and features
// have weight 0. A group's products are added in integers, exactly; an output element is one chain of fma over the
// groups. So neither the tile nor the instruction set changes a bit.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr int64_t kGroup = kInt8Group;
constexpr int64_t kQuads = kGroup / 4;
constexpr int64_t kWeightBytes = kGroup * kLanes;
constexpr int64_t kGroupBytes = kWeightBytes + kLanes * int64_t{sizeof(float)};
constexpr int64_t kRowBlock = 64;

OCTAVO_INLINE int64_t num_groups(int64_t num_cols) { return (num_cols + kGroup - 1) / kGroup; }

// One row of activations, quantised: for each group 32 signed bytes, then its scale and -128 times its sum.
struct Group {
    int8_t values[kGroup];
    float scale;
    int32_t start;  // what a dot product with weights + 128 begins at
};
static_assert(sizeof(Group) == kInt8GroupBytes);

void pack_panel(const PackInt8Args& a, int64_t panel) {
    uint8_t* out = static_cast<uint8_t*>(a.packed) + panel * num_groups(a.num_cols) * kGroupBytes;
    for (int64_t g = 0; g < num_groups(a.num_cols); ++g, out += kGroupBytes) {
        float scales[kLanes] = {};
        for (int64_t i = 0; i < kWeightBytes; ++i) out[i] = 128;
        for (int64_t lane = 0; lane < kLanes && panel * kLanes + lane < a.num_rows; ++lane) {
            const int64_t row = panel * kLanes + lane;
            scales[lane] = a.scales[row * num_groups(a.num_cols) + g];
            for (int64_t i = 0; i < kGroup && g * kGroup + i < a.num_cols; ++i)
                out[(i / 4 * kLanes + lane) * 4 + i % 4] =
                    uint8_t(128 + a.weight[row * a.num_cols + g * kGroup + i]);
        }
        __builtin_memcpy(out + kWeightBytes, scales, sizeof(scales));
    }
}

void embed(const EmbeddingArgs& a, int64_t token) {
    const int64_t row = a.token_ids[token], lane = row % kLanes;
    const uint8_t* group =
        static_cast<const uint8_t*>(a.packed) + row / kLanes * num_groups(a.num_cols) * kGroupBytes;
    float* out = a.out + token * a.num_cols;
    for (int64_t k = 0; k < a.num_cols; ++k) {
        const uint8_t* block = group + k / kGroup * kGroupBytes;
        float scale;
        __builtin_memcpy(&scale, block + kWeightBytes + lane * sizeof(float), sizeof(float));
        const int64_t i = k % kGroup;
        out[k] = scale * float(int(block[(i / 4 * kLanes + lane) * 4 + i % 4]) - 128);
    }
}

// Scale: the largest magnitude becomes 127. A group with a NaN or an infinity gets a NaN for a scale, and so do all
// outputs of its row.
template <class T>
OCTAVO_INLINE void quantize_group(const T* x, int64_t count, Group& group) {
    const Vec low = load(x, count), high = count > kLanes ? load(x + kLanes, count - kLanes) : set1(0.0f);
    const Vec zero = set1(0.0f);
    const Vec magnitude = max(max(low, sub(zero, low)), max(high, sub(zero, high)));
    const float largest = reduce_max(magnitude), poison = reduce_add(add(mul(low, zero), mul(high, zero)));
    const float inverse = largest > 0x1p-118f ? 127.0f / largest : 0.0f;  // below, it would overflow
    const Vec shift = set1(0x1.8p23f);  // adding it rounds to an integer
    const Vec low_rounded = sub(fma(low, set1(inverse), shift), shift);
    const Vec high_rounded = sub(fma(high, set1(inverse), shift), shift);
    store_int8(group.values, low_rounded);
    store_int8(group.values + kLanes, high_rounded);
    group.scale = largest / 127.0f + poison;
    group.start = poison == 0.0f ? -128 * int32_t(reduce_add(add(low_rounded, high_rounded))) : 0;
}

template <class T>
OCTAVO_INLINE void quantize_rows(const LinearArgs& a, const T* x) {
    const int64_t groups = num_groups(a.num_cols);
    parallel_ranges(a.num_tokens, 8192 / a.num_cols, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            Group* out = static_cast<Group*>(static_cast<void*>(a.x_f32)) + row * groups;
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t left = a.num_cols - g * kGroup;
                quantize_group(x + row * a.num_cols + g * kGroup, left < kGroup ? left : kGroup, out[g]);
            }
        }
    });
}

// R rows times P panels in registers.
template <int R, int P>
void tile(const LinearArgs& a, const Group* x, int64_t row, int64_t panel) {
    const int64_t groups = num_groups(a.num_cols), stride = groups * kGroupBytes;
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * stride;
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sum[r][p] = set1(0.0f);
    for (int64_t g = 0; g < groups; ++g, w += kGroupBytes, ++x) {
        IntVec dot[R][P];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) dot[r][p] = int_set1(x[r * groups].start);
#pragma GCC unroll 8
        for (int64_t quad = 0; quad < kQuads; ++quad) {
            IntVec weight[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                if (R == 1) __builtin_prefetch(w + p * stride + quad * 4 * kLanes + 2 * kGroupBytes);
                weight[p] = int_load(w + p * stride + quad * 4 * kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p)
                    dot[r][p] = dot4(dot[r][p], weight[p], x[r * groups].values + quad * 4);
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const Vec scale = load(static_cast<const float*>(static_cast<const void*>(w + p * stride + kWeightBytes)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sum[r][p] = fma(to_float(dot[r][p]), mul(scale, set1(x[r * groups].scale)), sum[r][p]);
        }
    }
    with_type(a.out_dtype, a.out, [&](auto* out) {
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) {
                const int64_t column = (panel + p) * kLanes, n = a.num_rows - column;
                const Vec y = a.bias ? add(sum[r][p], load(a.bias + column, n)) : sum[r][p];
                store(out + (row + r) * a.num_rows + column, y, n);
            }
    });
}

template <int R>
void tiles(const LinearArgs& a, const Group* x, int64_t row, int64_t panel, int64_t num_panels) {
    constexpr int P = kInt8Panels;
    for (; num_panels >= P; panel += P, num_panels -= P) tile<R, P>(a, x, row, panel);
    for (; num_panels > 0; ++panel, --num_panels) tile<R, 1>(a, x, row, panel);
}

template <int R>
OCTAVO_INLINE void some_rows(const LinearArgs& a, const Group* x, int64_t row, int64_t num_rows, int64_t panel,
                             int64_t num_panels) {
    if constexpr (R > 0) {
        if (num_rows == R) return tiles<R>(a, x, row, panel, num_panels);
        some_rows<R - 1>(a, x, row, num_rows, panel, num_panels);
    }
}

}  // namespace

void pack_int8(const PackInt8Args& a) noexcept {
    parallel((a.num_rows + kLanes - 1) / kLanes, [&](int64_t panel) { pack_panel(a, panel); });
}

void embedding_int8(const EmbeddingArgs& a) noexcept {
    parallel_ranges(a.num_tokens, 4096 / a.num_cols, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) embed(a, token);
    });
}

void linear_int8(const LinearArgs& a) noexcept {
    with_type(a.x_dtype, a.x, [&](auto* x) { quantize_rows(a, x); });
    const Group* quantized = static_cast<const Group*>(static_cast<const void*>(a.x_f32));
    const int64_t num_panels = (a.num_rows + kLanes - 1) / kLanes;
    const int64_t num_units = (num_panels + kInt8Panels - 1) / kInt8Panels;
    parallel(num_units * ((a.num_tokens + kRowBlock - 1) / kRowBlock), [&](int64_t unit) {
        const int64_t panel = unit % num_units * kInt8Panels, first = unit / num_units * kRowBlock;
        const int64_t last = first + kRowBlock < a.num_tokens ? first + kRowBlock : a.num_tokens;
        const int64_t count = num_panels - panel < kInt8Panels ? num_panels - panel : kInt8Panels;
        for (int64_t row = first; row < last; row += kInt8Rows) {
            const int64_t num_rows = last - row < kInt8Rows ? last - row : kInt8Rows;
            some_rows<kInt8Rows>(a, quantized + row * num_groups(a.num_cols), row, num_rows, panel, count);
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
