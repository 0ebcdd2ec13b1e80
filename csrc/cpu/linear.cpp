// Packing, and what reads packed weights: linear and embedding.
//
// A packed matrix is a row of panels of 16 output features, zero-filled at the end, each streamed along K:
//   bf16       [N/16][ceil(K/2)][16][2]   pairs along K: one operand of a dot product, or split with a shift and a mask
//   f16, f32   [N/16][K][16]
// Every output element is one chain of fma over k = 0 … K-1, whatever tile computes it; bias is added last. In a pair the
// second comes first, as in AVX512_BF16's dot product, so that this gives the same bits as two multiply-adds.
#include "rows.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Rows of x that stay in the cache while the panels pass by.
constexpr int64_t kRowBlock = 8 * kTileRows;
// How far ahead of its use a panel is fetched: the hardware stops at the end of a page. Gains 10 to 15 % at few rows.
constexpr int64_t kPrefetchBytes = 1024;

template <class W>
constexpr bool kPaired = false;
template <>
constexpr bool kPaired<bf16> = true;

template <class W>
OCTAVO_INLINE int64_t panel_size(int64_t num_cols) {
    return (kPaired<W> ? (num_cols + 1) / 2 * 2 : num_cols) * kLanes;
}

template <class W>
OCTAVO_INLINE int64_t panel_index(int64_t lane, int64_t k) {
    return kPaired<W> ? (k / 2 * kLanes + lane) * 2 + k % 2 : k * kLanes + lane;
}

template <class W>
void pack_panel(const PackArgs& a, W* packed, int64_t panel) {
    W* out = packed + panel * panel_size<W>(a.num_cols);
    for (int64_t i = 0; i < panel_size<W>(a.num_cols); ++i) out[i] = W{};
    for (int64_t lane = 0; lane < kLanes && panel * kLanes + lane < a.num_rows; ++lane) {
        const W* row = as_type_of(packed, a.weight) + (panel * kLanes + lane) * a.num_cols;
        for (int64_t k = 0; k < a.num_cols; ++k) out[panel_index<W>(lane, k)] = row[k];
    }
}

template <class W>
void embed(const EmbeddingArgs& a, const W* packed, int64_t token) {
    const int64_t row = a.token_ids[token];
    const W* panel = packed + row / kLanes * panel_size<W>(a.num_cols);
    float* out = a.out + token * a.num_cols;
    for (int64_t k = 0; k < a.num_cols; k += kLanes) {
        const int64_t n = a.num_cols - k < kLanes ? a.num_cols - k : kLanes;
        W values[kLanes] = {};
        for (int64_t i = 0; i < n; ++i) values[i] = panel[panel_index<W>(row % kLanes, k + i)];
        store(out + k, load(values), n);
    }
}

template <class W>
OCTAVO_INLINE const W* prefetched(const W* p) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
    return p;
}

template <int R, int P>
OCTAVO_INLINE void multiply(Vec (&sum)[R][P], const Vec (&w)[P], const float* x) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const Vec value = set1(x[r * kLanes]);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sum[r][p] = fma(value, w[p], sum[r][p]);
    }
}

// One block of columns (num_cols of them), and the panels' rows that belong to it.
template <int R, int P, class W>
OCTAVO_INLINE void multiply_block(Vec (&sum)[R][P], const float* x, const W* panel, int64_t panel_stride,
                                  int num_cols) {
    Vec w[P];
    for (int k = 0; k < num_cols; ++k, panel += kLanes, ++x) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) w[p] = load(prefetched(panel + p * panel_stride));
        multiply<R, P>(sum, w, x);
    }
}
template <int R, int P>
OCTAVO_INLINE void multiply_block(Vec (&sum)[R][P], const float* x, const bf16* panel, int64_t panel_stride,
                                  int num_cols) {
    Vec w[P];
    for (int k = 0; k < num_cols; k += 2, panel += 2 * kLanes, x += 2) {  // the last pair may end with zeros
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) w[p] = load_second(prefetched(panel + p * panel_stride));
        multiply<R, P>(sum, w, x + 1);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) w[p] = load_first(panel + p * panel_stride);
        multiply<R, P>(sum, w, x);
    }
}

#if defined(OCTAVO_ISA_avx512bf16)
template <int R, int P>
OCTAVO_INLINE void multiply_block(Vec (&sum)[R][P], const Bf16Pair* x, const bf16* panel, int64_t panel_stride,
                                  int num_pairs) {
    IntVec w[P];
    for (int k = 0; k < num_pairs; ++k, panel += 2 * kLanes, ++x) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) w[p] = load_pairs(prefetched(panel + p * panel_stride));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const IntVec value = int_set1(bits_at(x + r * kLanes));
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sum[r][p] = dot2(sum[r][p], w[p], value);
        }
    }
}
#endif

// R rows times P panels, held in registers. x is the rows' block of activations, `row` the first one's place in out.
template <int R, int P, class W, class X>
void tile(const LinearArgs& a, const W* packed, const X* x, int64_t row, int64_t panel) {
    const int64_t stride = panel_size<W>(a.num_cols);
    const W* w = packed + panel * stride;
    Vec sum[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sum[r][p] = set1(0.0f);
    int64_t rest = num_items<X>(a.num_cols);
    for (; rest >= kLanes; rest -= kLanes, w += kLanes * kLanes * kColumns<X>, x += kBlock)
        multiply_block(sum, x, w, stride, kLanes);
    if (rest > 0) multiply_block(sum, x, w, stride, int(rest));
    write_sums(a, sum[0], R, P, row, panel);
}

template <int R, class W, class X>
void tiles(const LinearArgs& a, const W* packed, const X* x, int64_t row, int64_t panel, int64_t num_panels) {
    constexpr int P = R <= 2 ? kNarrowPanels : kTilePanels;
    for (; num_panels >= P; panel += P, num_panels -= P) tile<R, P>(a, packed, x, row, panel);
    for (; num_panels > 0; ++panel, --num_panels) tile<R, 1>(a, packed, x, row, panel);
}

// The same for num_rows rows, at most R.
template <int R, class W, class X>
OCTAVO_INLINE void some_rows(const LinearArgs& a, const W* packed, const X* x, int64_t row, int64_t num_rows,
                             int64_t panel, int64_t num_panels) {
    if constexpr (R > 0) {
        if (num_rows == R) return tiles<R>(a, packed, x, row, panel, num_panels);
        some_rows<R - 1>(a, packed, x, row, num_rows, panel, num_panels);
    }
}

// Units are (rows, panels): all rows of a block pass by a group of panels while both lie in the caches.
template <class W, class X>
void multiply_matrix(const LinearArgs& a, const W* packed, const X* blocks) {
    const int64_t num_panels = (a.num_rows + kLanes - 1) / kLanes;
    const int64_t group = a.num_tokens <= 2 ? kNarrowPanels : kTilePanels, size = unit_panels(a, group);
    const int64_t num_units = (num_panels + size - 1) / size;
    parallel(num_units * ((a.num_tokens + kRowBlock - 1) / kRowBlock), [&](int64_t unit) {
        const int64_t first_panel = unit % num_units * size, first = unit / num_units * kRowBlock;
        const int64_t last_panel = first_panel + size < num_panels ? first_panel + size : num_panels;
        const int64_t last = first + kRowBlock < a.num_tokens ? first + kRowBlock : a.num_tokens;
        for (int64_t panel = first_panel; panel < last_panel; panel += group) {
            const int64_t count = last_panel - panel < group ? last_panel - panel : group;
            for (int64_t row = first; row < last; row += kTileRows) {
                const X* x = blocks + row / kTileRows * kBlock * num_blocks<X>(a.num_cols);
                const int64_t num_rows = last - row < kTileRows ? last - row : kTileRows;
                some_rows<kTileRows>(a, packed, x, row, num_rows, panel, count);
            }
        }
    });
}

#if defined(OCTAVO_ISA_avx512bf16)
void multiply_pairs(const LinearArgs& a) {
    Bf16Pair* blocks = static_cast<Bf16Pair*>(static_cast<void*>(a.x_f32));
    multiply_matrix(a, static_cast<const bf16*>(a.packed), arrange_rows(a, static_cast<const bf16*>(a.x), blocks));
}
#endif

}  // namespace

void pack(const PackArgs& a) noexcept {
    with_type(a.dtype, a.packed, [&](auto* packed) {
        parallel((a.num_rows + kLanes - 1) / kLanes, [&](int64_t panel) { pack_panel(a, packed, panel); });
    });
}

void embedding(const EmbeddingArgs& a) noexcept {
    with_type(a.dtype, a.packed, [&](auto* packed) {
        parallel_ranges(a.num_tokens, 4096 / a.num_cols, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) embed(a, packed, token);
        });
    });
}

void linear(const LinearArgs& a) noexcept {
#if defined(OCTAVO_ISA_avx512bf16)
    if (a.x_dtype == DType::bf16 && a.weight_dtype == DType::bf16)
        multiply_pairs(a);
    else
#endif
        with_type(a.weight_dtype, a.packed, [&, x = widen_rows(a)](auto* packed) { multiply_matrix(a, packed, x); });
    if (a.draws) draw_largest(a);
}

}  // namespace octavo::OCTAVO_ISA
