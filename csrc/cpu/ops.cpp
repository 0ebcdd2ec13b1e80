// What an op needs around its kernel: the pool, scratch memory and, for attention, the plan of its units.
#include "ops.h"

#include <algorithm>
#include <chrono>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa.h"
#include "replay.h"
#include "sampling.h"
#include "thread_pool.h"

namespace octavo {

namespace {

// Splits each request's rows (query · group + head) evenly into units. A request with few rows, as in decoding, is also
// split at the partitions, so that one long sequence keeps all threads busy. The split changes who computes, never
// what.
struct AttentionPlan {
    std::vector<AttentionUnit> units, merges;
    int64_t num_partials = 0;  // floats

    void make(const AttentionArgs& a) {
        units.clear();
        merges.clear();
        num_partials = 0;
        const int64_t group = a.num_heads / a.cache.num_kv_heads;
        for (int32_t request = 0; request < a.num_requests; ++request) {
            const int64_t num_queries = a.query_start[request + 1] - a.query_start[request];
            const int64_t num_rows = num_queries * group;
            if (num_rows == 0) continue;
            const int64_t last_position = a.seq_lens[request] - 1, first_position = last_position - num_queries + 1;
            const int64_t first_seen = a.window > 0 ? std::max<int64_t>(0, first_position - a.window + 1) : 0;
            const int64_t first_partition = first_seen / kPartition;
            const int64_t num_partitions = last_position / kPartition - first_partition + 1;
            const int64_t num_units = (num_rows + kAttentionRows - 1) / kAttentionRows;
            for (int32_t head = 0; head < a.cache.num_kv_heads; ++head) {
                for (int64_t unit = 0; unit < num_units; ++unit) {
                    const int64_t first = unit * num_rows / num_units, last = (unit + 1) * num_rows / num_units;
                    AttentionUnit next = {request, head, int32_t(first), int32_t(last - first), -1, num_partials};
                    if (num_rows > 2 * kAttentionRows || num_partitions == 1) {
                        units.push_back(next);
                        continue;
                    }
                    AttentionUnit merge = next;
                    merge.partition = int32_t(num_partitions);
                    merges.push_back(merge);
                    for (int64_t p = 0; p < num_partitions; ++p) {
                        next.partition = int32_t(first_partition + p);
                        next.partial = num_partials;
                        num_partials += next.num_rows * (a.cache.head_dim + 2);
                        units.push_back(next);
                    }
                }
            }
        }
    }
};

}  // namespace

int64_t packed_size(int64_t num_rows, int64_t num_cols, DType dtype) noexcept {
    const int64_t depth = dtype == DType::bf16 ? (num_cols + 1) / 2 * 2 : num_cols;
    return (num_rows + kLanes - 1) / kLanes * kLanes * depth;
}

int64_t linear_scratch(int64_t num_tokens, int64_t num_cols) noexcept {
    return (num_tokens + kMaxTileRows - 1) * ((num_cols + kLanes - 1) / kLanes * kLanes);
}

int64_t quantized_scratch(int64_t num_tokens, int64_t num_cols) noexcept {
    return (num_tokens + kMaxInt8Rows - 1) * ((num_cols + kQuantBlock - 1) / kQuantBlock);
}

int64_t packed_quantized_bytes(int64_t num_rows, int64_t num_cols, const QuantizedForm& form) noexcept {
    const int64_t num_panels = (num_rows + kLanes - 1) / kLanes, num_blocks = (num_cols + kQuantBlock - 1) / kQuantBlock;
    const int64_t value_bytes = kQuantBlock * form.bits / 8, num_scales = kQuantBlock / form.group;
    const int64_t scale_bytes = (form.wide_scales ? 4 : 2) * num_scales * (form.has_mins ? 2 : 1);
    return num_panels * num_blocks * kLanes * (value_bytes + scale_bytes);
}

namespace {

// Every step streams the weights whole, and huge pages spare the address translation. Failure is harmless.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t num_bytes) {
#ifdef __linux__
    constexpr uintptr_t kHuge = uintptr_t{1} << 21;
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (address + kHuge - 1) & ~(kHuge - 1), last = (address + num_bytes) & ~(kHuge - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Room for `count` elements of activations; behind them, where they are wanted, for the largest outputs.
template <class T>
T* product_scratch(OpScope& scope, LinearArgs& a, int64_t count) {
    const int64_t num_bytes = (count * int64_t{sizeof(T)} + 63) / 64 * 64, panels = kLargestPanels * kLanes;
    const int64_t num_largest = a.draws ? (a.num_rows + panels - 1) / panels * a.num_tokens : 0;
    char* scratch = static_cast<char*>(scope.workspace(num_bytes + num_largest * sizeof(Largest)));
    a.largest = reinterpret_cast<Largest*>(scratch + num_bytes);
    return reinterpret_cast<T*>(scratch);
}

// Plans the units, and returns scratch memory: num_bytes (a multiple of 64) of the caller's own, then the partials.
char* plan_attention(OpScope& scope, AttentionArgs& args, int64_t num_bytes) {
    static AttentionPlan plan;  // kept for its capacity; the scope lets one op in at a time
    plan.make(args);
    args.units = plan.units.data();
    args.num_units = static_cast<int64_t>(plan.units.size());
    args.merges = plan.merges.data();
    args.num_merges = static_cast<int64_t>(plan.merges.size());
    char* scratch = static_cast<char*>(scope.workspace(num_bytes + plan.num_partials * sizeof(float)));
    args.partials = reinterpret_cast<float*>(scratch + num_bytes);
    return scratch;
}

// Blocks of one tile for every request's tokens, one request after the other.
struct ScratchTables {
    std::vector<int32_t> block_table, slot_mapping, seq_lens;
    int64_t max_blocks = 0, num_blocks = 0;

    void make(const EncoderAttentionArgs& a) {
        seq_lens.resize(a.num_requests);
        max_blocks = num_blocks = 0;
        for (int64_t r = 0; r < a.num_requests; ++r) {
            seq_lens[r] = a.query_start[r + 1] - a.query_start[r];
            max_blocks = std::max(max_blocks, (seq_lens[r] + kLanes - 1) / kLanes);
        }
        block_table.resize(a.num_requests * max_blocks);
        slot_mapping.resize(a.num_tokens);
        for (int64_t r = 0; r < a.num_requests; ++r) {
            for (int32_t i = 0; i < seq_lens[r]; ++i) slot_mapping[a.query_start[r] + i] = num_blocks * kLanes + i;
            for (int32_t i = 0; i < seq_lens[r]; i += kLanes)
                block_table[r * max_blocks + i / kLanes] = static_cast<int32_t>(num_blocks++);
        }
    }
};

// What an op needs beside its arguments: nothing, unless there is a function for them below.
template <class Args>
void prepare(OpScope&, Args&) {}

void prepare(OpScope&, PackArgs& a) {
    const int64_t item_bytes = a.dtype == DType::f32 ? 4 : 2;
    advise_huge_pages(a.packed, packed_size(a.num_rows, a.num_cols, a.dtype) * item_bytes);
}

void prepare(OpScope&, PackQuantizedArgs& a) {
    advise_huge_pages(a.packed, packed_quantized_bytes(a.num_rows, a.num_cols, a.form));
}

void prepare(OpScope& scope, LinearArgs& a) {
    a.x_f32 = product_scratch<float>(scope, a, linear_scratch(a.num_tokens, a.num_cols));
}

void prepare(OpScope& scope, AttentionArgs& a) {
    a.q_stride = a.num_heads * a.cache.head_dim;
    a.causal = true;
    plan_attention(scope, a, 0);
}

void prepare(OpScope& scope, SampleArgs& a) {
    a.sums = static_cast<double*>(scope.workspace(a.num_rows * num_sum_blocks(a.vocab_size) * sizeof(double)));
}

void multiply_quantized(OpScope& scope, LinearQuantizedArgs a) {
    if (a.int8_activations) {
        a.x_int8 = product_scratch<QuantizedInput>(scope, a, quantized_scratch(a.num_tokens, a.num_cols));
        return active_table().linear_int8(a);
    }
    prepare(scope, static_cast<LinearArgs&>(a));
    active_table().linear_weight_only(a);
}

void attend_within(OpScope& scope, EncoderAttentionArgs a) {
    static ScratchTables tables;
    tables.make(a);
    AttentionArgs args = {};
    args.q = a.qkv;
    args.cache = {nullptr, tables.num_blocks, a.num_heads, kLanes, a.head_dim, a.dtype};
    args.block_table = tables.block_table.data();
    args.query_start = a.query_start;
    args.seq_lens = tables.seq_lens.data();
    args.out = a.out;
    args.num_requests = a.num_requests;
    args.max_blocks = tables.max_blocks;
    args.num_heads = a.num_heads;
    args.q_stride = 3 * a.num_heads * a.head_dim;
    args.scale = a.scale;
    args.dtype = a.dtype;
    args.causal = false;
    const int64_t item_bytes = a.dtype == DType::f32 ? 4 : 2;
    const int64_t cache_bytes = tables.num_blocks * a.num_heads * 2 * kLanes * a.head_dim * item_bytes;
    args.cache.data = plan_attention(scope, args, cache_bytes);
    active_table().write_kv({a.qkv, tables.slot_mapping.data(), args.cache, a.num_tokens, a.num_heads});
    active_table().paged_attention(args);
}

template <class Fn>
double seconds(Fn fn) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

#define OCTAVO_DEFINE(name, Args)              \
    void name(Args args) {                     \
        run(args, +[](OpScope& scope, Args a) { \
            prepare(scope, a);                 \
            active_table().name(a);            \
        });                                    \
    }
OCTAVO_KERNEL_OPS(OCTAVO_DEFINE)

void linear_quantized(LinearQuantizedArgs args) { run(args, &multiply_quantized); }
void encoder_attention(EncoderAttentionArgs args) { run(args, &attend_within); }

double time_fma(int64_t num_units) {
    OpScope scope;
    float* sink = static_cast<float*>(scope.workspace(num_units * kLanes * sizeof(float)));
    return seconds([&] { active_table().fma_loop(num_units, sink); });
}

double time_read(const ReadSpan* spans, int64_t num_spans) {
    OpScope scope;
    float* sink = static_cast<float*>(scope.workspace(num_spans * kLanes * sizeof(float)));
    return seconds([&] { active_table().read_loop(spans, num_spans, sink); });
}

double time_fork_join(int64_t repeats) {
    const int64_t num_units = num_threads();
    OpScope scope;
    const double total = seconds([&] {
        for (int64_t i = 0; i < repeats; ++i) parallel_for(num_units, [](const void*, int64_t) noexcept {}, nullptr);
    });
    return total / static_cast<double>(repeats);
}

}  // namespace octavo
