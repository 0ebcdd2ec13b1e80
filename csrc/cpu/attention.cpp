// Paged attention: exact softmax over fixed partitions of kPartition positions, counted from position 0.
//
// For one row (a query and a head) a partition gives sums = Σ e^(s_j - max) v_j, max and denominator = Σ e^(s_j - max);
// each score is one chain over the head's dimensions, each sum one chain over j, the denominator 16 partial sums and
// the tree. Partitions are merged in order. A row's chains run over exactly the positions it sees, so neither its
// neighbours nor what lies elsewhere in the cache, nor who computes it, can change a bit.
#include "attention_tiles.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Folds the partial result of the next partition into `into`.
OCTAVO_INLINE void merge(float* into, const float* next, int64_t dim) {
    if (next[dim + 1] == 0.0f) return;
    if (into[dim + 1] == 0.0f) {
        for (int64_t d = 0; d < dim + 2; ++d) into[d] = next[d];
        return;
    }
    const Vec old_max = set1(into[dim]), next_max = set1(next[dim]), both = max(old_max, next_max);
    const Vec old_weight = exp_nonpositive(sub(old_max, both)), next_weight = exp_nonpositive(sub(next_max, both));
    for (int64_t d = 0; d < dim; d += kLanes)
        store(into + d, fma(load(into + d), old_weight, mul(load(next + d), next_weight)));
    store(into + dim, both, 1);
    store(into + dim + 1, fma(set1(into[dim + 1]), old_weight, mul(set1(next[dim + 1]), next_weight)), 1);
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

// Fills w.partial for `num_rows` rows of one partition.
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

    const int32_t* blocks = a.block_table + unit.request * a.max_blocks;
    const int64_t first_tile = first[begin] / kLanes, last_tile = (last[end - 1] + kLanes - 1) / kLanes;
    for (int64_t t = first_tile; t < last_tile; ++t) {
        const int64_t position = start + t * kLanes, offset = position % a.cache.block_size;
        const int64_t block = blocks[position / a.cache.block_size];
        w.key_tile[t] = key_tiles(a.cache, cache, block, unit.kv_head) + offset / kLanes * tile_size<C>(w.head_dim);
        w.value_tile[t] = w.key_tile[t] + a.cache.block_size / kLanes * tile_size<C>(w.head_dim);
    }
    for (int64_t row = begin; row < end; row += kQueryRows) {
        with_count(end - row < kQueryRows ? end - row : kQueryRows, [&](auto count) {
            constexpr int R = decltype(count)::value;
            const int64_t first_tile = first[row] / kLanes, last_tile = (last[row + R - 1] + kLanes - 1) / kLanes;
            score_rows<R>(w, row, first_tile, last_tile);
            for (int64_t r = row; r < row + R; ++r)
                softmax_row(w, r, first[r], last[r], first_tile * kLanes, last_tile * kLanes);
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
        float query[kMaxHeadDim];
        with_type(a.dtype, a.q, [&](auto* q) {
            for (int64_t d = 0; d < w.head_dim; d += kLanes)
                store(query + d, mul(load(q + offset + d), set1(a.scale)));
        });
        set_query(w, r, query);
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

// Merges a unit whose partitions were computed apart. `partition` is how many there are.
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
    with_cache_type(a.cache, [&](const auto* cache) {
        parallel(a.num_units, [&](int64_t unit) { attend(a, cache, a.units[unit]); });
    });
    parallel(a.num_merges, [&](int64_t unit) { merge_partitions(a, a.merges[unit]); });
}

}  // namespace octavo::OCTAVO_ISA
