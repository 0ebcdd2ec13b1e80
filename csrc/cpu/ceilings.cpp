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

// Reads num_bytes, in units of 1 MiB, once.
void read_loop(const void* data, int64_t num_bytes, float* sink) noexcept {
    constexpr int64_t kUnit = int64_t{1} << 18;  // floats
    parallel(num_bytes / 4 / kUnit, [&](int64_t unit) {
        const float* p = static_cast<const float*>(data) + unit * kUnit;
        Vec sum[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
        for (int64_t i = 0; i < kUnit; i += 4 * kLanes)
            for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], load(p + i + j * kLanes));
        store(sink + unit * kLanes, add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    });
}

}  // namespace octavo::OCTAVO_ISA
