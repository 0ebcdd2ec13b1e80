// Ops over single rows: norms, gated activation, row selection.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Elements that a unit of work covers at least: some microseconds.
constexpr int64_t kGrain = 16384;

// Sixteen partial sums of squares over the row, then the tree.
template <class In, class Out>
void norm_row(const RmsNormArgs& a, const In* x, float* residual, Out* out) {
    const int64_t size = a.hidden_size;
    Vec squares = set1(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec value = load(x + i, size - i);
        if (residual) {
            value = add(load(residual + i, size - i), value);
            store(residual + i, value, size - i);
        }
        squares = fma(value, value, squares);
    }
    const float* source = residual ? residual : reinterpret_cast<const float*>(x);
    const Vec scale = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / float(size) + a.eps));
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec value = mul(load(source + i, size - i), scale);
        store(out + i, mul(value, load(a.weight + i, size - i)), size - i);
    }
}

template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec g = load(gate + i, size - i);
        const Vec silu = div(g, add(set1(1.0f), exp(sub(set1(0.0f), g))));
        store(out + i, mul(silu, load(up + i, size - i)), size - i);
    }
}

}  // namespace

void rms_norm(const RmsNormArgs& a) noexcept {
    with_type(a.x_dtype, a.x, [&](auto* x) {
        with_type(a.out_dtype, a.out, [&](auto* out) {
            parallel_ranges(a.num_tokens, kGrain / a.hidden_size, [&](int64_t first, int64_t last) {
                for (int64_t row = first; row < last; ++row) {
                    const int64_t start = row * a.hidden_size;
                    norm_row(a, x + start, a.residual ? a.residual + start : nullptr, out + start);
                }
            });
        });
    });
}

void silu_mul(const SiluMulArgs& a) noexcept {
    with_type(a.dtype, a.out, [&](auto* out) {
        const auto* gate_up = as_type_of(out, a.gate_up);
        parallel_ranges(a.num_tokens, kGrain / 4 / a.size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                const auto* gate = gate_up + row * 2 * a.size;
                silu_mul_row(gate, gate + a.size, out + row * a.size, a.size);
            }
        });
    });
}

void gather_rows(const GatherRowsArgs& a) noexcept {
    parallel_ranges(a.num_rows, kGrain * 4 / a.row_bytes, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const char* source = static_cast<const char*>(a.x) + a.indices[row] * a.row_bytes;
            __builtin_memcpy(static_cast<char*>(a.out) + row * a.row_bytes, source, a.row_bytes);
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
