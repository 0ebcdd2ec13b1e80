// Loops that do nothing but reach the machine's ceilings, to hold kernels against: multiply-adds, reads, fork and join.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

// One unit is 2^16 steps of enough independent chains to fill the pipes; the result is stored, so that it is computed.
void fma_loop(int64_t num_units, float* sink) noexcept {
    parallel(num_units, [&](int64_t unit) {
        constexpr int kChains = kTileRows * kTilePanels;
        Vec sum[kChains];
#pragma GCC unroll 24
        for (int i = 0; i < kChains; ++i) sum[i] = set1(float(i));
        const Vec a = set1(0.999f), b = set1(0.001f);
        for (int64_t step = 0; step < kFmaSteps / kChains; ++step) {
#pragma GCC unroll 24
            for (int i = 0; i < kChains; ++i) sum[i] = fma(sum[i], a, b);
        }
        Vec total = sum[0];
        for (int i = 1; i < kChains; ++i) total = add(total, sum[i]);
        store(sink + unit * kLanes, total);
    });
}

// Reads every span, a unit each, once.
void read_loop(const ReadSpan* spans, int64_t num_spans, float* sink) noexcept {
    parallel(num_spans, [&](int64_t unit) {
        const float* p = static_cast<const float*>(spans[unit].data);
        Vec sum[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
        for (int64_t i = 0; i < spans[unit].num_bytes / 4; i += 4 * kLanes)
            for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], load(p + i + j * kLanes));
        store(sink + unit * kLanes, add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    });
}

}  // namespace octavo::OCTAVO_ISA
