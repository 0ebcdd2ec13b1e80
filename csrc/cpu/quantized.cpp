// Quantised weights (their packing is described in quantized.h): packing, rows of an embedding, and the product with
// activations that are quantised here, 32 columns at a time.
//
// A group's products are added in integers, exactly, and multiplied by the scale of the activations; an output element
// is one chain of fma over the groups. So neither the tile nor the instruction set changes a bit.
#include "quantized.h"

#include "rows.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Rows of x that stay in the cache while the panels pass by.
constexpr int64_t kRowBlock = kInt8Rows * ((64 + kInt8Rows - 1) / kInt8Rows);
// Panels of a unit of work.
constexpr int64_t kUnitPanels = 2;
static_assert(kUnitPanels % kInt8Panels == 0);
// The same distance as in linear.cpp, for few rows.
constexpr int64_t kPrefetchBytes = 1024;
// From how many rows on unpacking pays, and how many blocks of K are unpacked at a time.
constexpr int64_t kManyRows = 4 * kInt8Rows, kChunkBlocks = 18;

#if defined(OCTAVO_ISA_avx512) && !defined(OCTAVO_ISA_avx512vnni)
constexpr bool kUnpacksForMany = false;  // without VNNI it gains 2 % and doubles 20 seconds of compiling
#else
constexpr bool kUnpacksForMany = true;
#endif

template <int N>
struct Constant {
    static constexpr int value = N;
};

template <class F>
void pack_panel(const PackQuantizedArgs& a, int64_t panel) {
    using Scale = typename F::Scale;
    const int64_t num_groups = (a.num_cols + F::kGroup - 1) / F::kGroup, first_row = panel * kLanes;
    const int64_t num_lanes = a.num_rows - first_row < kLanes ? a.num_rows - first_row : kLanes;
    uint8_t* out = static_cast<uint8_t*>(a.packed) + panel * quant_blocks(a.num_cols) * F::kBlockBytes;
    for (int64_t block = 0; block < quant_blocks(a.num_cols); ++block, out += F::kBlockBytes) {
        uint8_t values[kLanes][kQuantBlock];
        __builtin_memset(values, a.form.zero, sizeof(values));
        Scale scales[2 * F::kGroups][kLanes] = {};  // and minima
        const int64_t column = block * kQuantBlock, left = a.num_cols - column;
        for (int64_t lane = 0; lane < num_lanes; ++lane) {
            const int64_t row = first_row + lane;
            __builtin_memcpy(values[lane], a.values + row * a.num_cols + column, left < kQuantBlock ? left : kQuantBlock);
            for (int64_t g = 0; g < F::kGroups && column + g * F::kGroup < a.num_cols; ++g) {
                const int64_t index = row * num_groups + block * F::kGroups + g;
                scales[g][lane] = static_cast<const Scale*>(a.scales)[index];
                if (F::kMins) scales[F::kGroups + g][lane] = static_cast<const Scale*>(a.mins)[index];
            }
        }
        constexpr int kStored = F::kBits == 8 ? kQuads : kQuads / 2;
        for (int quad = 0; quad < kStored; ++quad)
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                uint32_t four, upper;
                __builtin_memcpy(&four, values[lane] + quad * 4, 4);
                if (F::kBits == 4) {
                    __builtin_memcpy(&upper, values[lane] + (quad + kStored) * 4, 4);
                    four |= upper << 4;
                }
                __builtin_memcpy(out + (quad * kLanes + lane) * 4, &four, 4);
            }
        __builtin_memcpy(out + F::kValueBytes, scales, F::kBlockBytes - F::kValueBytes);
    }
}

// The weight of a scale and a minimum is exact before the subtraction, as in `Form`'s definition.
template <class F>
void embed(const EmbeddingQuantizedArgs& a, int64_t token) {
    const int64_t row = a.token_ids[token], lane = row % kLanes;
    const uint8_t* block =
        static_cast<const uint8_t*>(a.packed) + row / kLanes * quant_blocks(a.num_cols) * F::kBlockBytes;
    float* out = a.out + token * a.num_cols;
    for (int64_t first = 0; first < a.num_cols; first += F::kGroup) {
        const int group = int(first % kQuantBlock / F::kGroup);
        float scales[kLanes], mins[kLanes] = {};
        store(scales, load(scales_of<F>(block, group)));
        if (F::kMins) store(mins, load(mins_of<F>(block, group)));
        for (int64_t i = 0; i < F::kGroup && first + i < a.num_cols; ++i) {
            const int64_t quad = (first + i) % kQuantBlock / 4, stored = quad % (kQuads * F::kBits / 8);
            const uint8_t byte = block[(stored * kLanes + lane) * 4 + i % 4];
            const int value = F::kBits == 8 ? byte : quad == stored ? byte & 15 : byte >> 4;
            out[first + i] = scales[lane] * float(value - a.form.zero) - mins[lane];
        }
        if (group + 1 == F::kGroups) block += F::kBlockBytes;
    }
}

// Adding it rounds to an integer. And an integer below 2^22 in magnitude, added to its bits, makes the float kShift + the
// integer. So a dot product that begins with them needs no conversion: one fma takes kShift off and multiplies by the
// scale, rounding once, if that multiple of the scale is exact.
constexpr float kShift = 0x1.8p23f;
static_assert(kQuantBlock * 255 * 127 < 1 << 22);

// The scale makes the largest magnitude 127. A block with a NaN, an infinity or what is nearly one (beyond 2^110) gets a
// NaN for a scale, and so do all outputs of its row.
template <class T>
OCTAVO_INLINE void quantize_block(const T* x, int64_t count, const QuantizedForm& form, QuantizedInput& out) {
    const Vec low = load(x, count), high = count > kLanes ? load(x + kLanes, count - kLanes) : set1(0.0f);
    const float largest = reduce_max_magnitude(low, high);
    const float inverse = largest > 0x1p-118f ? 127.0f / largest : 0.0f;  // below, it would overflow
    const Vec shift = set1(kShift);
    const Vec low_rounded = sub(fma(low, set1(inverse), shift), shift);
    const Vec high_rounded = sub(fma(high, set1(inverse), shift), shift);
    store_int8(out.values, low_rounded);
    store_int8(out.values + kLanes, high_rounded);
    const bool is_number = largest <= 0x1p110f;
    const float scale = float_of(bits_of(largest / 127.0f) & ~3u);  // so short that 1.5 times it is exact
    out.scale = is_number ? scale : __builtin_nanf("");
    out.shift = out.scale * -kShift;
    const bool one_group = form.group == kQuantBlock;
    const float sums[2] = {reduce_add(one_group ? add(low_rounded, high_rounded) : low_rounded),
                           one_group ? 0.0f : reduce_add(high_rounded)};
    for (int g = 0; g < 2; ++g) {
        out.start[g] = int32_t(bits_of(kShift)) - (is_number ? form.zero * int32_t(sums[g]) : 0);
        out.offset[g] = -sums[g] * out.scale;
    }
}

// Where the blocks of a row begin: tiles of rows, in each [ceil(K / 32)][kInt8Rows], so that a register tile reads all
// its rows at fixed distances from one pointer.
OCTAVO_INLINE QuantizedInput* quantized_row(const LinearQuantizedArgs& a, int64_t row) {
    return a.x_int8 + row / kInt8Rows * kInt8Rows * quant_blocks(a.num_cols) + row % kInt8Rows;
}

OCTAVO_INLINE void quantize_rows(const LinearQuantizedArgs& a) {
    with_type(a.x_dtype, a.x, [&](auto* x) {
        parallel_ranges(a.num_tokens, 8192 / a.num_cols, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row) {
                QuantizedInput* out = quantized_row(a, row);
                for (int64_t column = 0; column < a.num_cols; column += kQuantBlock, out += kInt8Rows) {
                    const int64_t left = a.num_cols - column;
                    quantize_block(x + row * a.num_cols + column, left < kQuantBlock ? left : kQuantBlock, a.form,
                                   *out);
                }
            }
        });
    });
}

// Adds num_blocks blocks of R rows times P panels, which lie `stride` bytes apart, to sums in registers. `fetch` is
// called with each block of the first panel, to ask for memory that is needed later.
template <int R, int P, class F, class Fetch>
OCTAVO_INLINE void add_blocks(Vec (&sum)[R][P], const QuantizedInput* x, const uint8_t* w, int64_t stride,
                              int64_t num_blocks, const Fetch& fetch) {
    for (int64_t b = 0; b < num_blocks; ++b, w += F::kBlockBytes, x += kInt8Rows) {
        fetch(w);
        OCTAVO_UNROLL
        for (int g = 0; g < F::kGroups; ++g) {
            IntVec dot[R][P];
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r) {
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) dot[r][p] = int_set1(x[r].start[g]);
            }
            OCTAVO_UNROLL
            for (int quad = g * F::kGroup / 4; quad < (g + 1) * F::kGroup / 4; ++quad) {
                IntVec weight[P];
                OCTAVO_UNROLL
                for (int p = 0; p < P; ++p) weight[p] = load_quad<F>(w + p * stride, quad);
                OCTAVO_UNROLL
                for (int r = 0; r < R; ++r) {
                    OCTAVO_UNROLL
                    for (int p = 0; p < P; ++p) dot[r][p] = dot4(dot[r][p], weight[p], x[r].values + quad * 4);
                }
            }
            OCTAVO_UNROLL
            for (int p = 0; p < P; ++p) {
                const Vec scale = load(scales_of<F>(w + p * stride, g));
                OCTAVO_UNROLL
                for (int r = 0; r < R; ++r) {
                    const Vec product = fma(as_float(dot[r][p]), set1(x[r].scale), set1(x[r].shift));
                    sum[r][p] = fma(product, scale, sum[r][p]);
                }
                if constexpr (F::kMins) {
                    const Vec min = load(mins_of<F>(w + p * stride, g));
                    OCTAVO_UNROLL
                    for (int r = 0; r < R; ++r) sum[r][p] = fma(min, set1(x[r].offset[g]), sum[r][p]);
                }
            }
        }
    }
}

// Calls fn(R, row) for tiles of R rows that make up [row, last).
template <int R, class Fn>
OCTAVO_INLINE int64_t tiles_of(int64_t row, int64_t last, const Fn& fn) {
    if constexpr (R <= kInt8Rows)
        for (; last - row >= R; row += R) fn(Constant<R>{}, row);
    return row;
}
template <class Fn>
OCTAVO_INLINE void row_tiles(int64_t row, int64_t last, const Fn& fn) {
    row = tiles_of<6>(row, last, fn);
    row = tiles_of<4>(row, last, fn);
    row = tiles_of<2>(row, last, fn);
    tiles_of<1>(row, last, fn);
}

// Multiplies rows [first, last) by P panels, read from where they lie.
template <int P, class F>
void few_rows(const LinearQuantizedArgs& a, int64_t first, int64_t last, int64_t panel) {
    const int64_t num_blocks = quant_blocks(a.num_cols), stride = num_blocks * F::kBlockBytes;
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * stride;
    row_tiles(first, last, [&](auto rows, int64_t row) {
        constexpr int R = rows.value;
        Vec sum[R][P];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) sum[r][p] = set1(0.0f);
        add_blocks<R, P, F>(sum, quantized_row(a, row), w, stride, num_blocks, [&](const uint8_t* block) {
            if constexpr (R <= 2)  // memory bounds the speed
                for (int p = 0; p < P; ++p)
                    for (int64_t line = 0; line < F::kBlockBytes; line += 64)
                        __builtin_prefetch(block + p * stride + kPrefetchBytes + line);
        });
        write_sums(a, sum[0], R, P, row, panel);
    });
}

// Multiplies rows [first, last) by P panels that are unpacked once for all rows: a chunk of K at a time, which stays in
// the nearest cache while the rows pass by.
template <int P, class F>
void many_rows(const LinearQuantizedArgs& a, int64_t first, int64_t last, int64_t panel) {
    using U = typename F::Unpacked;
    constexpr int64_t kStride = kChunkBlocks * U::kBlockBytes;
    const int64_t num_blocks = quant_blocks(a.num_cols), stride = num_blocks * F::kBlockBytes;
    const uint8_t* w = static_cast<const uint8_t*>(a.packed) + panel * stride;
    const uint8_t* next = w + P * stride;
    alignas(64) uint8_t chunk[P * kStride];
    Vec sums[kRowBlock * P];
    for (int64_t block = 0; block < num_blocks; block += kChunkBlocks) {
        const int64_t count = num_blocks - block < kChunkBlocks ? num_blocks - block : kChunkBlocks;
        for (int p = 0; p < P; ++p)
            for (int64_t b = 0; b < count; ++b)
                unpack_block<F>(w + p * stride + (block + b) * F::kBlockBytes,
                                chunk + p * kStride + b * U::kBlockBytes);
        row_tiles(first, last, [&](auto rows, int64_t row) {
            constexpr int R = rows.value;
            Vec sum[R][P];
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p) sum[r][p] = block ? sums[(row - first + r) * P + p] : set1(0.0f);
            const QuantizedInput* x = quantized_row(a, row) + block * kInt8Rows;
            add_blocks<R, P, U>(sum, x, chunk, kStride, count, [&](const uint8_t*) {
                __builtin_prefetch(next, 0, 2);  // the panels that come next, a line a block, to the second cache
                next += 64;
            });
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p) sums[(row - first + r) * P + p] = sum[r][p];
        });
    }
    write_sums(a, sums, int(last - first), P, first, panel);
}

template <int P, class F>
void all_rows(const LinearQuantizedArgs& a, int64_t first, int64_t last, int64_t panel) {
    if constexpr (kUnpacksForMany)
        if (last - first >= kManyRows) return many_rows<P, F>(a, first, last, panel);
    few_rows<P, F>(a, first, last, panel);
}

template <class F>
void multiply(const LinearQuantizedArgs& a) {
    const int64_t num_panels = (a.num_rows + kLanes - 1) / kLanes, size = unit_panels(a, kUnitPanels);
    const int64_t num_units = (num_panels + size - 1) / size;
    parallel(num_units * ((a.num_tokens + kRowBlock - 1) / kRowBlock), [&](int64_t unit) {
        const int64_t first_panel = unit % num_units * size, first_row = unit / num_units * kRowBlock;
        const int64_t last_panel = first_panel + size < num_panels ? first_panel + size : num_panels;
        const int64_t last_row = first_row + kRowBlock < a.num_tokens ? first_row + kRowBlock : a.num_tokens;
        int64_t panel = first_panel;
        for (; panel + kInt8Panels <= last_panel; panel += kInt8Panels)
            all_rows<kInt8Panels, F>(a, first_row, last_row, panel);
        for (; panel < last_panel; ++panel) all_rows<1, F>(a, first_row, last_row, panel);
    });
}

}  // namespace

void pack_quantized(const PackQuantizedArgs& a) noexcept {
    with_form(a.form, [&](auto form) {
        parallel((a.num_rows + kLanes - 1) / kLanes, [&](int64_t panel) { pack_panel<decltype(form)>(a, panel); });
    });
}

void embedding_quantized(const EmbeddingQuantizedArgs& a) noexcept {
    with_form(a.form, [&](auto form) {
        parallel_ranges(a.num_tokens, 4096 / a.num_cols, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) embed<decltype(form)>(a, token);
        });
    });
}

void linear_int8(const LinearQuantizedArgs& a) noexcept {
    quantize_rows(a);
    with_form(a.form, [&](auto form) { multiply<decltype(form)>(a); });
    if (a.draws) draw_largest(a);
}

}  // namespace octavo::OCTAVO_ISA
