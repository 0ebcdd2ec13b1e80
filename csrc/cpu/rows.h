// Rows of activations as float32, and rows of sums that become output: shared by the matrix products.
#pragma once

#include "logit_keys.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

// Two columns of activations as they lie, where dot products of pairs are one instruction.
struct Bf16Pair {
    bf16 first, second;
};
// Columns that an item of activations has; items and blocks of a row.
template <class X>
constexpr int64_t kColumns = 1;
template <>
inline constexpr int64_t kColumns<Bf16Pair> = 2;
template <class X = float>
OCTAVO_INLINE int64_t num_items(int64_t num_cols) {
    return (num_cols + kColumns<X> - 1) / kColumns<X>;
}
template <class X = float>
OCTAVO_INLINE int64_t num_blocks(int64_t num_cols) {
    return (num_items<X>(num_cols) + kLanes - 1) / kLanes;
}

// Loads sixteen items of a row that has num_cols columns left, and zeros behind them.
template <class T>
OCTAVO_INLINE void put_items(float* out, const T* x, int64_t num_cols) {
    store(out, load(x, num_cols));
}
OCTAVO_INLINE void put_items(Bf16Pair* out, const bf16* x, int64_t num_cols) {
    constexpr int64_t kSize = 2 * kLanes;
    for (int64_t i = num_cols; i < kSize; ++i) (&out->first)[i] = bf16{};
    __builtin_memcpy(out, x, (num_cols < kSize ? num_cols : kSize) * sizeof(bf16));
}

// The activations of up to kTileRows rows, in blocks of 16 items: [blocks of a row][kTileRows][16], so that a register
// tile reads all its rows at fixed distances from one pointer.
constexpr int64_t kBlock = kTileRows * kLanes;

template <class T, class X>
OCTAVO_INLINE const X* arrange_rows(const LinearArgs& a, const T* x, X* blocks) {
    parallel_ranges(a.num_tokens, 8192 / a.num_cols, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            X* out = blocks + row / kTileRows * kBlock * num_blocks<X>(a.num_cols) + row % kTileRows * kLanes;
            for (int64_t k = 0; k < a.num_cols; k += kLanes * kColumns<X>, out += kBlock)
                put_items(out, x + row * a.num_cols + k, a.num_cols - k);
        }
    });
    return blocks;
}
OCTAVO_INLINE const float* widen_rows(const LinearArgs& a) {
    with_type(a.x_dtype, a.x, [&](auto* x) { arrange_rows(a, x, a.x_f32); });
    return a.x_f32;
}

// Panels of a unit of work. Where only the largest outputs are kept, a unit has those of one `Largest`, in order.
static_assert(kLargestPanels % kTilePanels == 0 && kLargestPanels % kNarrowPanels == 0 &&
              kLargestPanels % kInt8Panels == 0);
OCTAVO_INLINE int64_t unit_panels(const LinearArgs& a, int64_t usual) { return a.draws ? kLargestPanels : usual; }

// Folds sums, which are as write_sums has them, into the `Largest` of their rows.
static __attribute__((noinline)) void keep_largest(const LinearArgs& a, const Vec* sums, int num_rows, int num_panels,
                                                   int64_t row, int64_t panel) {
    for (int r = 0; r < num_rows; ++r) {
        Largest& largest = a.largest[panel / kLargestPanels * a.num_tokens + row + r];
        if (panel % kLargestPanels == 0) {
            for (int lane = 0; lane < kLanes; ++lane) largest.keys[lane] = kLowest, largest.outputs[lane] = 0;
            largest.has_nan = 0;
        }
        for (int p = 0; p < num_panels; ++p) {
            const int32_t first = int32_t((panel + p) * kLanes), n = int32_t(a.num_rows) - first;
            float values[kLanes];
            int32_t bits[kLanes], has_nan = 0;
            store(values, sums[r * num_panels + p]);
            __builtin_memcpy(bits, values, sizeof(bits));
            for (int lane = 0; lane < kLanes; ++lane) {
                const int32_t key = lane < n ? key_of(bits[lane]) : kLowest;
                const bool is_larger = key > largest.keys[lane];
                largest.keys[lane] = is_larger ? key : largest.keys[lane];
                largest.outputs[lane] = is_larger ? first + lane : largest.outputs[lane];
                has_nan |= lane < n && is_nan(bits[lane]);
            }
            largest.has_nan |= has_nan;
        }
    }
}

// Draws for each row the first of its largest outputs.
OCTAVO_INLINE void draw_largest(const LinearArgs& a) {
    const int64_t num_panels = (a.num_rows + kLanes - 1) / kLanes;
    const int64_t num_units = (num_panels + kLargestPanels - 1) / kLargestPanels;
    parallel(a.num_tokens, [&](int64_t row) {
        int32_t key = kLowest, output = 0, has_nan = 0;
        for (int64_t unit = 0; unit < num_units; ++unit) {
            const Largest& largest = a.largest[unit * a.num_tokens + row];
            has_nan |= largest.has_nan;
            for (int lane = 0; lane < kLanes; ++lane) {
                const int32_t other = largest.keys[lane], place = largest.outputs[lane];
                if (other < key || (other == key && place >= output)) continue;
                key = other;
                output = place;
            }
        }
        const bool is_finite = !has_nan && key < kInfinity && key > key_of(kNegativeInfinity);
        a.draws[row].token_id = output;
        a.draws[row].status = is_finite ? SampleStatus::good : SampleStatus::not_finite;
    });
}

// Writes the sums of some rows over some panels, [num_rows][num_panels], to the output.
static __attribute__((noinline)) void write_sums(const LinearArgs& a, const Vec* sums, int num_rows, int num_panels,
                                                 int64_t row, int64_t panel) {
    if (a.draws) return keep_largest(a, sums, num_rows, num_panels, row, panel);
    with_type(a.out_dtype, a.out, [&](auto* out) {
        for (int p = 0; p < num_panels; ++p) {
            const int64_t column = (panel + p) * kLanes, n = a.num_rows - column;
            const Vec bias = a.bias ? load(a.bias + column, n) : set1(0.0f);
            for (int r = 0; r < num_rows; ++r) {
                const Vec sum = sums[r * num_panels + p];
                store(out + (row + r) * a.num_rows + column, a.bias ? add(sum, bias) : sum, n);
            }
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
