// Products of query rows with one partition's tiles of keys and values, in registers.
//
// With a float cache everything is float32: a score is one chain over the head's dimensions, a sum one chain over the
// positions. With an int8 cache queries and weights are rounded to 16 bits, each row's by a scale of its own, and
// products are added as integers, exactly.
#pragma once

#include "kv_tile.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTiles = kPartition / kLanes;
constexpr int64_t kPartialRow = kMaxHeadDim + 2;  // sums, then max and denominator at [head_dim] and [head_dim + 1]
constexpr float kLargestWord = 32767.0f;
static_assert(int64_t{32767} * 127 * kPartition < int64_t{1} << 31 && kMaxHeadDim <= kPartition, "sums overflow");

template <bool IsInteger>
struct Arithmetic {
    using Factor = float;
    using Sum = Vec;
};
template <>
struct Arithmetic<true> {
    using Factor = int16_t;
    using Sum = IntVec;
};
// The type that elements of a cache are multiplied by, and the type that the products are added to.
template <class C>
using Factor = typename Arithmetic<kInteger<C>>::Factor;
template <class C>
using Sum = typename Arithmetic<kInteger<C>>::Sum;

// A unit's rows and what one partition needs of them. A denominator of 0 marks a row that sees nothing there.
template <class C>
struct Work {
    Factor<C> query[kAttentionRows][kMaxHeadDim];  // times the attention's scale
    Factor<C> weight[kAttentionRows][kPartition];
    float query_scale[kAttentionRows], weight_scale[kAttentionRows];  // where factors are integers
    float score[kAttentionRows][kPartition];
    float partial[kAttentionRows][kPartialRow];
    float result[kAttentionRows][kPartialRow];
    int64_t first[kAttentionRows], last[kAttentionRows];  // the row's positions: [first, last)
    const C* key_tile[kTiles];
    const C* value_tile[kTiles];
    int64_t head_dim;
};

// kPair elements for each lane, in the type that they are multiplied in.
struct Pair {
    Vec first, second;
};
template <class C>
OCTAVO_INLINE Vec load_lanes(const C* p) {
    return load(p);
}
OCTAVO_INLINE Pair load_lanes(const bf16* p) { return {load_first(p), load_second(p)}; }
OCTAVO_INLINE IntVec load_lanes(const int8_t* p) { return load_pairs(p); }

// Returns sum plus the products of each lane's elements with as many factors.
OCTAVO_INLINE Vec multiply(Vec sum, Vec lanes, const float* factors) { return fma(set1(factors[0]), lanes, sum); }
OCTAVO_INLINE Vec multiply(Vec sum, Pair lanes, const float* factors) {
    return fma(set1(factors[1]), lanes.second, fma(set1(factors[0]), lanes.first, sum));
}
OCTAVO_INLINE IntVec multiply(IntVec sum, IntVec lanes, const int16_t* factors) { return dot2(sum, lanes, factors); }

OCTAVO_INLINE void set_zero(Vec& sum) { sum = set1(0.0f); }
OCTAVO_INLINE void set_zero(IntVec& sum) { sum = int_set1(0); }

// Computes the scores of R rows from `row` on against the T tiles from `tile` on.
template <int R, int T, class C>
OCTAVO_INLINE void score_tiles(Work<C>& w, int64_t row, int64_t tile) {
    Sum<C> sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) set_zero(sum[r][t]);
    for (int64_t d = 0; d < w.head_dim; d += kPair<C>) {
        decltype(load_lanes(w.key_tile[0])) keys[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) keys[t] = load_lanes(w.key_tile[tile + t] + d * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) sum[r][t] = multiply(sum[r][t], keys[t], w.query[row + r] + d);
    }
    for (int t = 0; t < T; ++t) {
        const Vec scale = kQuantized<C> ? load(tile_scales(w.key_tile[tile + t], w.head_dim)) : set1(1.0f);
        for (int r = 0; r < R; ++r) {
            float* score = w.score[row + r] + (tile + t) * kLanes;
            if constexpr (kInteger<C>)
                store(score, mul(to_float(sum[r][t]), mul(scale, set1(w.query_scale[row + r]))));
            else
                store(score, kQuantized<C> ? mul(sum[r][t], scale) : sum[r][t]);
        }
    }
}

// Loads T vectors of one position's elements, which lie kPair apart.
template <int T>
OCTAVO_INLINE void load_position(const bf16* values, int64_t position, Vec* out) {
    for (int t = 0; t < T; ++t)
        out[t] = position % 2 ? load_second(values + t * 2 * kLanes) : load_first(values + t * 2 * kLanes);
}

// Adds positions [first, last) of the partition, weighted, to dims [d, d + 16·T) of R rows' sums. Factors that are
// integers begin and end with a pair.
template <int R, int T, class C>
OCTAVO_INLINE void add_values(Work<C>& w, int64_t row, int64_t d, int64_t first, int64_t last) {
    constexpr int64_t P = kPair<C>;
    const auto values_at = [&](int64_t position) {
        return w.value_tile[position / kLanes] + value_index<C>(position % kLanes / P * P, d, w.head_dim);
    };
    Sum<C> sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            if constexpr (kInteger<C>) set_zero(sum[r][t]);
            else sum[r][t] = load(w.partial[row + r] + d + t * kLanes);
        }
    // A pair of floats of which one position is not seen, and may hold anything.
    const auto add_one = [&](int64_t position) {
        if constexpr (P == 2 && !kInteger<C>) {
            Vec value[T];
            load_position<T>(values_at(position), position, value);
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < T; ++t) sum[r][t] = multiply(sum[r][t], value[t], w.weight[row + r] + position);
        }
    };
    if (first % P && first < last) add_one(first++);
    while (first + P <= last) {
        const C* value = values_at(first);
        const int64_t tile_end = (first / kLanes + 1) * kLanes, end = tile_end < last ? tile_end : last / P * P;
        for (; first < end; first += P, value += P * w.head_dim) {
            decltype(load_lanes(value)) lanes[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) lanes[t] = load_lanes(value + t * P * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int t = 0; t < T; ++t) sum[r][t] = multiply(sum[r][t], lanes[t], w.weight[row + r] + first);
        }
    }
    if (first < last) add_one(first);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            float* out = w.partial[row + r] + d + t * kLanes;
            if constexpr (kInteger<C>) store(out, mul(to_float(sum[r][t]), set1(w.weight_scale[row + r])));
            else store(out, sum[r][t]);
        }
}

// Vectors side by side in a register tile of R rows.
template <int R>
constexpr int kTileWidth = kQueryRows == 8 ? (R <= 4 ? 4 : 2) : (R <= 2 ? 2 : 1);

template <int R, class C>
void score_rows(Work<C>& w, int64_t row, int64_t first_tile, int64_t last_tile) {
    constexpr int T = kTileWidth<R>;
    for (; first_tile + T <= last_tile; first_tile += T) score_tiles<R, T>(w, row, first_tile);
    for (; first_tile < last_tile; ++first_tile) score_tiles<R, 1>(w, row, first_tile);
}

template <int R, class C>
void add_rows(Work<C>& w, int64_t row, int64_t first, int64_t last) {
    constexpr int T = kTileWidth<R>;
    int64_t d = 0;
    for (; d + T * kLanes <= w.head_dim; d += T * kLanes) add_values<R, T>(w, row, d, first, last);
    for (; d < w.head_dim; d += kLanes) add_values<R, 1>(w, row, d, first, last);
}

// Adds up the weighted values of R rows. Positions that all of them see are added for all at once, the others row by row.
// Integers are always added for all, since the weights of positions that a row does not see are 0.
template <int R, class C>
void weigh_values(Work<C>& w, int64_t row, const int64_t* first, const int64_t* last) {
    if constexpr (kInteger<C>) {
        add_rows<R>(w, row, first[0] / kLanes * kLanes, (last[R - 1] + kLanes - 1) / kLanes * kLanes);
    } else {
        const int64_t common_first = first[R - 1], common_last = last[0];
        if (common_first >= common_last) {
            for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, first[r], last[r]);
            return;
        }
        for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, first[r], common_first);
        add_rows<R>(w, row, common_first, common_last);
        for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, common_last, last[r]);
    }
}

// Rounds numbers to 16 bits; returns their scale, which is NaN if a number is NaN or infinite.
OCTAVO_INLINE float to_words(const float* x, int64_t count, int16_t* out) {
    const Vec zero = set1(0.0f), shift = set1(0x1.8p23f);  // adding the latter rounds to an integer
    Vec magnitude = zero, poison = zero;
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec v = load(x + i);
        magnitude = max(magnitude, max(v, sub(zero, v)));
        poison = fma(v, zero, poison);
    }
    const float largest = reduce_max(magnitude);
    const float inverse = largest > 0x1p-100f ? kLargestWord / largest : 0.0f;  // below, it would overflow
    for (int64_t i = 0; i < count; i += kLanes)
        store_int16(out + i, sub(fma(load(x + i), set1(inverse), shift), shift));
    return largest / kLargestWord + reduce_add(poison);
}

// Takes a row's query, which is float32 and scaled already.
template <class C>
OCTAVO_INLINE void set_query(Work<C>& w, int64_t row, const float* query) {
    if constexpr (kInteger<C>) {
        w.query_scale[row] = to_words(query, w.head_dim, w.query[row]);
    } else {
        for (int64_t d = 0; d < w.head_dim; d += kLanes) store(w.query[row] + d, load(query + d));
    }
}

// Loads the scales of a tile's values at positions [first, last) of the partition, and 0 elsewhere, where they may be
// anything.
template <class C>
OCTAVO_INLINE Vec value_scales(const Work<C>& w, int64_t tile, int64_t first, int64_t last) {
    const float* scales = tile_scales(w.value_tile[tile], w.head_dim);
    const int64_t begin = first - tile * kLanes, end = last - tile * kLanes;
    if (begin <= 0 && end >= kLanes) return load(scales);
    float seen[kLanes] = {};
    for (int64_t i = begin < 0 ? 0 : begin; i < end && i < kLanes; ++i) seen[i] = scales[i];
    return load(seen);
}

// Turns the scores of positions [first, last) of the partition into weights e^(s - max), with their maximum and their
// denominator. What is multiplied with values includes their scales, and is 0 from `begin` to `first` and from `last` to
// `end`, which are multiples of 16.
template <class C>
void softmax_row(Work<C>& w, int64_t row, int64_t first, int64_t last, int64_t begin, int64_t end) {
    float* score = w.score[row];
    for (int64_t j = begin; j < first; ++j) score[j] = -__builtin_inff();
    for (int64_t j = last; j < end; ++j) score[j] = -__builtin_inff();
    Vec largest = load(score + begin);
    for (int64_t j = begin + kLanes; j < end; j += kLanes) largest = max(largest, load(score + j));
    const float row_max = reduce_max(largest);
    Vec sum = set1(0.0f);
    for (int64_t j = begin; j < end; j += kLanes) {
        const Vec weight = exp_nonpositive(sub(load(score + j), set1(row_max)));
        sum = add(sum, weight);
        const Vec scaled = kQuantized<C> ? mul(weight, value_scales(w, j / kLanes, first, last)) : weight;
        if constexpr (kInteger<C>) store(score + j, scaled);
        else store(w.weight[row] + j, scaled);
    }
    if constexpr (kInteger<C>) w.weight_scale[row] = to_words(score + begin, end - begin, w.weight[row] + begin);
    w.partial[row][w.head_dim] = row_max;
    w.partial[row][w.head_dim + 1] = reduce_add(sum);
}

}  // namespace octavo::OCTAVO_ISA
