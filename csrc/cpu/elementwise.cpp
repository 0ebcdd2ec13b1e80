// Ops over single rows: norms, activations, row selection; and the mean of a request's rows.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Elements that a unit of work covers at least: some microseconds.
constexpr int64_t kGrain = 16384;

// The sum of squares is sixteen partial sums over the row, then the tree.
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

// The first n lanes, and zero in the others.
OCTAVO_INLINE Vec first_lanes(Vec a, int64_t n) {
    if (n >= kLanes) return a;
    float lane[kLanes];
    store(lane, a);
    return load(lane, n);
}

// The mean is sixteen partial sums and the tree, and so is the variance about it.
template <class In, class Out>
void layer_norm_row(const AddLayerNormArgs& a, const In* x, float* residual, Out* out) {
    const int64_t size = a.hidden_size;
    Vec sum = set1(0.0f), squares = set1(0.0f);
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec value = add(load(residual + i, size - i), load(x + i, size - i));
        store(residual + i, value, size - i);
        sum = add(sum, value);
    }
    const Vec mean = set1(reduce_add(sum) / float(size));
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec centered = first_lanes(sub(load(residual + i, size - i), mean), size - i);
        squares = fma(centered, centered, squares);
    }
    const Vec scale = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / float(size) + a.eps));
    for (int64_t i = 0; i < size; i += kLanes) {
        const Vec normed = mul(sub(load(residual + i, size - i), mean), scale);
        const Vec value = fma(normed, load(a.weight + i, size - i), load(a.bias + i, size - i));
        store(residual + i, value, size - i);
        store(out + i, value, size - i);
    }
}

// x·Φ(x) = max(x, 0) - |x|·h, where h = Φ(-|x|) = e^(-x²/2)·p(t), t = 1 / (1 + 0.34·|x|): p is fitted for the least
// relative error (1.4e-8) up to 14.5, behind which h is zero. The rounding of x² is made up for.
OCTAVO_INLINE Vec gelu(Vec x) {
    const Vec zero = set1(0.0f), size = min(set1(20.0f), max(sub(zero, x), x)), square = mul(size, size);
    const Vec lost = fma(size, size, sub(zero, square));
    const Vec t = div(set1(1.0f), fma(size, set1(0x1.5c28f6p-2f), set1(1.0f)));
    Vec p = set1(-0x1.d12b64p-6f);
    p = fma(p, t, set1(0x1.349c66p-3f));
    p = fma(p, t, set1(-0x1.2fe8dap-2f));
    p = fma(p, t, set1(0x1.d794b4p-3f));
    p = fma(p, t, set1(-0x1.0b70f8p-4f));
    p = fma(p, t, set1(0x1.ffed6cp-4f));
    p = fma(p, t, set1(0x1.cc1b6ep-4f));
    p = fma(p, t, set1(0x1.17d496p-3f));
    p = fma(p, t, set1(0x1.15a44ep-3f));
    p = fma(p, t, set1(0x1.338a4cp-19f));
    const Vec tail = mul(p, mul(exp(mul(square, set1(-0.5f))), fma(lost, set1(-0.5f), set1(1.0f))));
    return sub(max(zero, x), mul(size, tail));
}

// x / (1 + e^-s)
OCTAVO_INLINE Vec times_sigmoid(Vec x, Vec s) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), s)))); }

// x·(1 + tanh(u)) / 2 = x / (1 + e^(-2u)), u = √(2/π)·(x + 0.044715·x³).
OCTAVO_INLINE Vec gelu_tanh(Vec x) {
    const Vec cubed = fma(mul(x, x), set1(0x1.6e4e26p-5f), set1(1.0f));
    return times_sigmoid(x, mul(mul(x, set1(0x1.988454p+0f)), cubed));
}

// Multiplies act(first half) by the second half, row by row.
template <class Act>
void gated(const GatedArgs& a, const Act& act) {
    with_type(a.dtype, a.out, [&](auto* out) {
        const auto* gate_up = as_type_of(out, a.gate_up);
        parallel_ranges(a.num_tokens, kGrain / 4 / a.size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                const auto *gate = gate_up + row * 2 * a.size, *up = gate + a.size;
                auto* result = out + row * a.size;
                for (int64_t i = 0, n = a.size; n > 0; i += kLanes, n -= kLanes)
                    store(result + i, mul(act(load(gate + i, n)), load(up + i, n)), n);
            }
        });
    });
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

void add_layer_norm(const AddLayerNormArgs& a) noexcept {
    with_type(a.x_dtype, a.x, [&](auto* x) {
        with_type(a.out_dtype, a.out, [&](auto* out) {
            parallel_ranges(a.num_tokens, kGrain / a.hidden_size, [&](int64_t first, int64_t last) {
                for (int64_t row = first; row < last; ++row) {
                    const int64_t start = row * a.hidden_size;
                    layer_norm_row(a, x + start, a.residual + start, out + start);
                }
            });
        });
    });
}

void gelu(const GeluArgs& a) noexcept {
    with_type(a.dtype, a.out, [&](auto* out) {
        const auto* x = as_type_of(out, a.x);
        parallel_ranges(a.count, kGrain / 4, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i += kLanes) store(out + i, gelu(load(x + i, last - i)), last - i);
        });
    });
}

// Each column is one chain over the request's rows.
void mean_rows(const MeanRowsArgs& a) noexcept {
    with_type(a.dtype, a.x, [&](auto* x) {
        parallel(a.num_requests, [&](int64_t r) {
            const int64_t first = a.row_start[r], last = a.row_start[r + 1], size = a.hidden_size;
            const Vec count = set1(float(last - first));
            for (int64_t i = 0; i < size; i += kLanes) {
                Vec sum = set1(0.0f);
                for (int64_t row = first; row < last; ++row) sum = add(sum, load(x + row * size + i, size - i));
                store(a.out + r * size + i, div(sum, count), size - i);
            }
        });
    });
}

void l2_normalize(const L2NormalizeArgs& a) noexcept {
    with_type(a.dtype, a.x, [&](auto* x) {
        parallel_ranges(a.num_rows, kGrain / a.hidden_size, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                const auto* in = x + row * a.hidden_size;
                Vec squares = set1(0.0f);
                for (int64_t i = 0; i < a.hidden_size; i += kLanes) {
                    const Vec value = load(in + i, a.hidden_size - i);
                    squares = fma(value, value, squares);
                }
                const Vec norm = max(set1(1e-12f), set1(__builtin_sqrtf(reduce_add(squares))));
                for (int64_t i = 0; i < a.hidden_size; i += kLanes)
                    store(a.out + row * a.hidden_size + i, div(load(in + i, a.hidden_size - i), norm),
                          a.hidden_size - i);
            }
        });
    });
}

void silu_mul(const GatedArgs& a) noexcept {
    gated(a, [](Vec x) { return times_sigmoid(x, x); });
}

void gelu_tanh_mul(const GatedArgs& a) noexcept { gated(a, gelu_tanh); }

void scale(const ScaleArgs& a) noexcept {
    parallel_ranges(a.count, kGrain, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i += kLanes)
            store(a.out + i, mul(load(a.x + i, last - i), set1(a.factor)), last - i);
    });
}

void gather_rows(const GatherRowsArgs& a) noexcept {
    const int64_t row_bytes = a.num_cols * a.item_bytes;
    parallel_ranges(a.num_rows, kGrain * 4 / row_bytes, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const char* source = static_cast<const char*>(a.x) + a.indices[row] * row_bytes;
            __builtin_memcpy(static_cast<char*>(a.out) + row * row_bytes, source, row_bytes);
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
