// Rows of activations as float32, and rows of sums that become output: shared by the matrix products.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {

// The activations of up to kTileRows rows as float32, in blocks of 16 columns: [ceil(K / 16)][kTileRows][16], so that a
// register tile reads all its rows at fixed distances from one pointer.
constexpr int64_t kBlock = kTileRows * kLanes;

OCTAVO_INLINE int64_t num_blocks(int64_t num_cols) { return (num_cols + kLanes - 1) / kLanes; }

// Activations to float32, in blocks.
OCTAVO_INLINE void widen_rows(const LinearArgs& a) {
    with_type(a.x_dtype, a.x, [&](auto* x) {
        parallel_ranges(a.num_tokens, 8192 / a.num_cols, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                float* out = a.x_f32 + row / kTileRows * kBlock * num_blocks(a.num_cols) + row % kTileRows * kLanes;
                for (int64_t k = 0; k < a.num_cols; k += kLanes, out += kBlock)
                    store(out, load(x + row * a.num_cols + k, a.num_cols - k));
            }
        });
    });
}

// The sums of some rows over some panels, [num_rows][num_panels], into the output.
static __attribute__((noinline)) void write_sums(const LinearArgs& a, const Vec* sums, int num_rows, int num_panels,
                                                 int64_t row, int64_t panel) {
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
