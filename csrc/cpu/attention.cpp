// Paged attention: exact softmax over fixed partitions of kPartition positions, counted from position 0.
//
// For one row (a query and a head) a partition gives sums = Σ e^(s_j - max) v_j, max and denominator = Σ e^(s_j - max);
// each score is one chain over the head's dimensions, each sum one chain over j, the denominator 16 partial sums and
// the tree. Partitions are merged in order. A row's chains run over exactly the positions it sees, so neither its
// neighbours nor what lies elsewhere in the cache, nor who computes it, can change a bit.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr int64_t kTiles = kPartition / kLanes;
constexpr int64_t kPartialRow = kMaxHeadDim + 2;  // sums, then max and denominator at [head_dim] and [head_dim + 1]

// A unit's rows and what one partition needs of them. A denominator of 0 marks a row that sees nothing there.
template <class C>
struct Work {
    float query[kAttentionRows][kMaxHeadDim];  // scaled
    float score[kAttentionRows][kPartition];
    float partial[kAttentionRows][kPartialRow];
    float result[kAttentionRows][kPartialRow];
    int64_t first[kAttentionRows], last[kAttentionRows];  // the row's positions: [first, last)
    const C* key_tile[kTiles];                            // [head_dim][16]
    const C* value_tile[kTiles];                          // [16][head_dim]
    int64_t head_dim;
};

// Folds the partial result of the next partition into `into`.
OCTAVO_INLINE void merge(float* into, const float* next, int64_t dim) {
    if (next[dim + 1] == 0.0f) return;
    if (into[dim + 1] == 0.0f) {
        for (int64_t d = 0; d < dim + 2; ++d) into[d] = next[d];
        return;
    }
    const Vec old_max = set1(into[dim]), next_max = set1(next[dim]), both = max(old_max, next_max);
    const Vec old_weight = exp(sub(old_max, both)), next_weight = exp(sub(next_max, both));
    for (int64_t d = 0; d < dim; d += kLanes)
        store(into + d, fma(load(into + d), old_weight, mul(load(next + d), next_weight)));
    store(into + dim, both, 1);
    store(into + dim + 1, fma(set1(into[dim + 1]), old_weight, mul(set1(next[dim + 1]), next_weight)), 1);
}

// Scores of R rows from `row` on against the T tiles from `tile` on.
template <int R, int T, class C>
OCTAVO_INLINE void score_tiles(Work<C>& w, int64_t row, int64_t tile) {
    Vec sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = set1(0.0f);
    for (int64_t d = 0; d < w.head_dim; ++d) {
        Vec key[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) key[t] = load(w.key_tile[tile + t] + d * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec q = set1(w.query[row + r][d]);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) sum[r][t] = fma(q, key[t], sum[r][t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(w.score[row + r] + (tile + t) * kLanes, sum[r][t]);
}

// Adds positions [first, last) of the partition, weighted, to dims [d, d + 16·T) of R rows' sums.
template <int R, int T, class C>
OCTAVO_INLINE void add_values(Work<C>& w, int64_t row, int64_t d, int64_t first, int64_t last) {
    Vec sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = load(w.partial[row + r] + d + t * kLanes);
    while (first < last) {
        const C* value = w.value_tile[first / kLanes] + first % kLanes * w.head_dim + d;
        const int64_t tile_end = (first / kLanes + 1) * kLanes, end = tile_end < last ? tile_end : last;
        for (; first < end; ++first, value += w.head_dim) {
            Vec v[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) v[t] = load(value + t * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec weight = set1(w.score[row + r][first]);
#pragma GCC unroll 4
                for (int t = 0; t < T; ++t) sum[r][t] = fma(weight, v[t], sum[r][t]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(w.partial[row + r] + d + t * kLanes, sum[r][t]);
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

// Calls fn with num_rows, at most R, as a compile-time constant.
template <int R>
struct Count {
    static constexpr int value = R;
};
template <int R = kQueryRows, class Fn>
OCTAVO_INLINE void with_count(int64_t num_rows, const Fn& fn) {
    if constexpr (R > 0) {
        if (num_rows == R) return fn(Count<R>{});
        with_count<R - 1>(num_rows, fn);
    }
}

// Scores -> weights e^(s - max), the maximum and the denominator, over positions [first, last) of the partition.
template <class C>
void softmax_row(Work<C>& w, int64_t row, int64_t first, int64_t last) {
    float* score = w.score[row];
    const int64_t begin = first / kLanes * kLanes, end = (last + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = begin; j < first; ++j) score[j] = -__builtin_inff();
    for (int64_t j = last; j < end; ++j) score[j] = -__builtin_inff();
    Vec largest = load(score + begin);
    for (int64_t j = begin + kLanes; j < end; j += kLanes) largest = max(largest, load(score + j));
    const float row_max = reduce_max(largest);
    Vec sum = set1(0.0f);
    for (int64_t j = begin; j < end; j += kLanes) {
        const Vec weight = exp(sub(load(score + j), set1(row_max)));
        store(score + j, weight);
        sum = add(sum, weight);
    }
    w.partial[row][w.head_dim] = row_max;
    w.partial[row][w.head_dim + 1] = reduce_add(sum);
}

// Weighted values of R rows. Positions that all of them see are added for all at once, the others row by row.
template <int R, class C>
void weigh_values(Work<C>& w, int64_t row, const int64_t* first, const int64_t* last) {
    const int64_t common_first = first[R - 1], common_last = last[0];
    if (common_first >= common_last) {
        for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, first[r], last[r]);
        return;
    }
    for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, first[r], common_first);
    add_rows<R>(w, row, common_first, common_last);
    for (int r = 0; r < R; ++r) add_rows<1>(w, row + r, common_last, last[r]);
}

// Fills w.partial for `num_rows` rows and one partition.
template <class C>
void attend_partition(const AttentionArgs& a, const C* cache, const AttentionUnit& unit, Work<C>& w,
                      int64_t partition) {
    const int64_t start = partition * kPartition;
    int64_t first[kAttentionRows], last[kAttentionRows];
    int64_t begin = unit.num_rows, end = 0;  // rows that see something: positions only grow, so they lie side by side
    for (int64_t r = 0; r < unit.num_rows; ++r) {
        first[r] = w.first[r] > start ? w.first[r] - start : 0;
        last[r] = w.last[r] - start < kPartition ? w.last[r] - start : kPartition;
        for (int64_t d = 0; d < w.head_dim + 2; ++d) w.partial[r][d] = 0.0f;
        if (first[r] >= last[r]) continue;
        begin = begin < r ? begin : r;
        end = r + 1;
    }
    if (begin >= end) return;

    const int64_t head_size = a.cache.block_size * w.head_dim;
    const int32_t* blocks = a.block_table + unit.request * a.max_blocks;
    const int64_t first_tile = first[begin] / kLanes, last_tile = (last[end - 1] + kLanes - 1) / kLanes;
    for (int64_t t = first_tile; t < last_tile; ++t) {
        const int64_t position = start + t * kLanes, offset = position % a.cache.block_size;
        const int64_t block = blocks[position / a.cache.block_size];
        const C* keys = cache + (block * a.cache.num_kv_heads + unit.kv_head) * 2 * head_size;
        w.key_tile[t] = keys + offset * w.head_dim;
        w.value_tile[t] = keys + head_size + offset * w.head_dim;
    }
    for (int64_t row = begin; row < end; row += kQueryRows) {
        with_count(end - row < kQueryRows ? end - row : kQueryRows, [&](auto count) {
            constexpr int R = decltype(count)::value;
            score_rows<R>(w, row, first[row] / kLanes, (last[row + R - 1] + kLanes - 1) / kLanes);
            for (int64_t r = row; r < row + R; ++r) softmax_row(w, r, first[r], last[r]);
            weigh_values<R>(w, row, first + row, last + row);
        });
    }
}

// Where a unit's row lies in q or in the output, in elements; tokens lie `stride` elements apart.
OCTAVO_INLINE int64_t row_offset(const AttentionArgs& a, const AttentionUnit& unit, int64_t row, int64_t stride) {
    const int64_t group = a.num_heads / a.cache.num_kv_heads, index = unit.first_row + row;
    const int64_t token = a.query_start[unit.request] + index / group;
    return token * stride + (unit.kv_head * group + index % group) * a.cache.head_dim;
}

void write_row(const AttentionArgs& a, const AttentionUnit& unit, int64_t row, const float* result) {
    const int64_t dim = a.cache.head_dim, offset = row_offset(a, unit, row, a.num_heads * dim);
    with_type(a.dtype, a.out, [&](auto* out) {
        for (int64_t d = 0; d < dim; d += kLanes)
            store(out + offset + d, div(load(result + d), set1(result[dim + 1])));
    });
}

template <class C>
void attend(const AttentionArgs& a, const C* cache, const AttentionUnit& unit) {
    Work<C> w;
    w.head_dim = a.cache.head_dim;
    const int64_t group = a.num_heads / a.cache.num_kv_heads;
    const int64_t num_queries = a.query_start[unit.request + 1] - a.query_start[unit.request];
    const int64_t first_query = a.seq_lens[unit.request] - num_queries;  // its position
    for (int64_t r = 0; r < unit.num_rows; ++r) {
        const int64_t position = first_query + (unit.first_row + r) / group;
        w.last[r] = a.causal ? position + 1 : a.seq_lens[unit.request];
        w.first[r] = a.window > 0 && w.last[r] > a.window ? w.last[r] - a.window : 0;
        w.result[r][w.head_dim + 1] = 0.0f;
        const int64_t offset = row_offset(a, unit, r, a.q_stride);
        with_type(a.dtype, a.q, [&](auto* q) {
            for (int64_t d = 0; d < w.head_dim; d += kLanes)
                store(w.query[r] + d, mul(load(q + offset + d), set1(a.scale)));
        });
    }
    if (unit.partition >= 0) {
        attend_partition(a, cache, unit, w, unit.partition);
        for (int64_t r = 0; r < unit.num_rows; ++r) {
            float* out = a.partials + unit.partial + r * (w.head_dim + 2);
            for (int64_t d = 0; d < w.head_dim + 2; ++d) out[d] = w.partial[r][d];
        }
        return;
    }
    const int64_t last = (w.last[unit.num_rows - 1] - 1) / kPartition;
    for (int64_t partition = w.first[0] / kPartition; partition <= last; ++partition) {
        attend_partition(a, cache, unit, w, partition);
        for (int64_t r = 0; r < unit.num_rows; ++r) merge(w.result[r], w.partial[r], w.head_dim);
    }
    for (int64_t r = 0; r < unit.num_rows; ++r) write_row(a, unit, r, w.result[r]);
}

// A unit whose partitions were computed apart: `partition` is their number.
void merge_partitions(const AttentionArgs& a, const AttentionUnit& unit) {
    const int64_t size = a.cache.head_dim + 2;
    for (int64_t r = 0; r < unit.num_rows; ++r) {
        float result[kPartialRow];
        result[size - 1] = 0.0f;
        for (int64_t p = 0; p < unit.partition; ++p)
            merge(result, a.partials + unit.partial + (p * unit.num_rows + r) * size, a.cache.head_dim);
        write_row(a, unit, r, result);
    }
}

}  // namespace

void paged_attention(const AttentionArgs& a) noexcept {
    with_type(a.cache.dtype, static_cast<const void*>(a.cache.data),
              [&](auto* cache) { parallel(a.num_units, [&](int64_t unit) { attend(a, cache, a.units[unit]); }); });
    parallel(a.num_merges, [&](int64_t unit) { merge_partitions(a, a.merges[unit]); });
}

}  // namespace octavo::OCTAVO_ISA
