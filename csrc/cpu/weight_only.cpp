// Quantised weights times activations of 16 or 32 bits: weights become float32 in registers, and an output element is
// one chain of fma over k = 0 … K-1, as if the matrix had been unpacked for `linear`.
#include "quantized.h"
#include "rows.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Rows of x that stay in the cache while the panels pass by.
constexpr int64_t kRowBlock = 8 * kTileRows;

// R rows, in blocks, times 16 columns of a block of weights: its first or its second half.
template <int R, class F>
OCTAVO_INLINE void multiply_half(Vec (&sum)[R], const float* x, const uint8_t* block, int half, Vec zero) {
    const int group = half * int(kLanes) / F::kGroup;
    const Vec scale = load(scales_of<F>(block, group));
    const Vec min = F::kMins ? sub(set1(0.0f), load(mins_of<F>(block, group))) : set1(0.0f);
    OCTAVO_UNROLL
    for (int quad = 0; quad < 4; ++quad) {
        const IntVec values = load_quad<F>(block, half * 4 + quad);
        OCTAVO_UNROLL
        for (int i = 0; i < 4; ++i) {
            const Vec value = sub(to_float(byte_of(values, i)), zero);
            const Vec weight = F::kMins ? fma(scale, value, min) : mul(scale, value);
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r) sum[r] = fma(set1(x[r * kLanes + quad * 4 + i]), weight, sum[r]);
        }
    }
}

template <int R, class F>
void tile(const LinearQuantizedArgs& a, const float* x, int64_t row, int64_t panel) {
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * quant_blocks(a.num_cols) * F::kBlockBytes;
    const Vec zero = set1(float(a.form.zero));
    Vec sum[R];
    for (int r = 0; r < R; ++r) sum[r] = set1(0.0f);
    for (int64_t column = 0; column < a.num_cols; column += kQuantBlock, w += F::kBlockBytes) {
        multiply_half<R, F>(sum, x, w, 0, zero);
        x += kBlock;
        if (column + kLanes >= a.num_cols) break;
        multiply_half<R, F>(sum, x, w, 1, zero);
        x += kBlock;
    }
    write_sums(a, sum, R, 1, row, panel);
}

template <int R, class F>
OCTAVO_INLINE void some_rows(const LinearQuantizedArgs& a, const float* x, int64_t row, int64_t num_rows,
                             int64_t panel) {
    if constexpr (R > 0) {
        if (num_rows == R) return tile<R, F>(a, x, row, panel);
        some_rows<R - 1, F>(a, x, row, num_rows, panel);
    }
}

template <class F>
void multiply(const LinearQuantizedArgs& a) {
    const int64_t num_panels = (a.num_rows + kLanes - 1) / kLanes, size = unit_panels(a, 1);
    const int64_t num_units = (num_panels + size - 1) / size;
    parallel(num_units * ((a.num_tokens + kRowBlock - 1) / kRowBlock), [&](int64_t unit) {
        const int64_t first_panel = unit % num_units * size, first = unit / num_units * kRowBlock;
        const int64_t last_panel = first_panel + size < num_panels ? first_panel + size : num_panels;
        const int64_t last = first + kRowBlock < a.num_tokens ? first + kRowBlock : a.num_tokens;
        for (int64_t panel = first_panel; panel < last_panel; ++panel)
            for (int64_t row = first; row < last; row += kTileRows) {
                const float* x = a.x_f32 + row / kTileRows * kBlock * num_blocks(a.num_cols);
                some_rows<kTileRows, F>(a, x, row, last - row < kTileRows ? last - row : kTileRows, panel);
            }
    });
}

}  // namespace

void linear_weight_only(const LinearQuantizedArgs& a) noexcept {
    widen_rows(a);
    with_form(a.form, [&](auto form) { multiply<decltype(form)>(a); });
    if (a.draws) draw_largest(a);
}

}  // namespace octavo::OCTAVO_ISA
