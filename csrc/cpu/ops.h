// The ops as plain functions over pointers and sizes, and the table that an instruction set fills in.
//
// An op is a struct of arguments, whose `describe` says once what each of them is, and a line in a list below. Visitors
// read the description (describe.h): call.h takes a call from Python apart by it, replay.h scales counts by it and
// checks indices. The order in `describe` is that of the arguments in Python.
//
// Kernel files of different instruction sets may all include this, for nothing here has a body that they would compile:
// `describe` is a template, which only other files call.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, f8 = 4 };

// Columns of the weight matrix in one packed panel, and positions in one tile of keys: one vector of floats.
constexpr int64_t kLanes = 16;
// Most rows of x in one register tile of `linear`.
constexpr int64_t kMaxTileRows = 8;
// Most rows of a register tile where activations are quantised.
constexpr int64_t kMaxInt8Rows = 6;
constexpr int64_t kMaxHeadDim = 256;
// Rows (query heads of one key-value head) that one unit of attention works on.
constexpr int64_t kAttentionRows = 8;
// ATTENTION_PARTITION of octavo/kernels/ops.py.
constexpr int64_t kPartition = 512;
// Vector multiply-adds in one unit of the arithmetic ceiling.
constexpr int64_t kFmaSteps = 24 << 16;
// Bytes that one turn of the reading ceiling reads: four vectors.
constexpr int64_t kReadBytes = 4 * kLanes * 4;

// How a matrix is quantised: w[n, k] = scale * (value - zero) - min, a scale (and min) for each `group` columns of a
// row. QuantizedForm of octavo/kernels/quantized.py.
struct QuantizedForm {
    int32_t bits;   // 4 or 8: values are unsigned
    int32_t group;  // 16 or 32
    int32_t zero;
    bool has_mins;
    bool wide_scales;  // float32 instead of float16; of the minima too
};

// Elements in the packed form of a [num_rows, num_cols] matrix.
int64_t packed_size(int64_t num_rows, int64_t num_cols, DType dtype) noexcept;

// Bytes of the packed form of a quantised matrix.
int64_t packed_quantized_bytes(int64_t num_rows, int64_t num_cols, const QuantizedForm& form) noexcept;

struct PackArgs {
    const void* weight;
    void* packed;  // aligned to 64 bytes
    int64_t num_rows, num_cols;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.tensor("weight", weight, dtype, {num_rows, num_cols});
        v.tensor("packed", packed, dtype, {packed_size(num_rows, num_cols, dtype)});
    }
};

struct PackQuantizedArgs {
    const uint8_t* values;
    const void* scales;  // one for each group of columns
    const void* mins;    // likewise, or null
    void* packed;        // aligned to 64 bytes
    int64_t num_rows, num_cols;
    QuantizedForm form;

    template <class Visitor>
    void describe(Visitor& v) {
        v.form("form", form);
        v.tensor("values", values, {num_rows, num_cols});
        const int64_t num_groups = (num_cols + form.group - 1) / form.group;
        v.tensor("scales", scales, form.wide_scales ? DType::f32 : DType::f16, {num_rows, +num_groups});
        if (form.has_mins) v.tensor("mins", mins, form.wide_scales ? DType::f32 : DType::f16, {num_rows, +num_groups});
        v.bytes("packed", packed, packed_quantized_bytes(num_rows, num_cols, form));
    }
};

struct EmbeddingArgs {
    const int32_t* token_ids;
    const void* packed;
    float* out;
    int64_t num_tokens, num_rows, num_cols;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.matrix("packed", packed, dtype, num_rows, num_cols);
        v.indices("token_ids", token_ids, num_tokens, num_rows);
        v.tensor("out", out, {num_tokens, num_cols});
    }
};

struct EmbeddingQuantizedArgs {
    const int32_t* token_ids;
    const void* packed;
    float* out;
    int64_t num_tokens, num_rows, num_cols;
    QuantizedForm form;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.matrix("packed", packed, form, num_rows, num_cols);
        v.indices("token_ids", token_ids, num_tokens, num_rows);
        v.tensor("out", out, {num_tokens, num_cols});
    }
};

// Columns that share a scale of their quantised activations, and lie together in a packed quantised matrix.
constexpr int64_t kQuantBlock = 32;

// One block of columns of one row of activations.
struct QuantizedInput {
    int8_t values[kQuantBlock];
    float scale;
    float shift;       // takes what dot products begin with off again: see quantized.cpp
    int32_t start[2];  // for each group of weights: what its dot product with unsigned weights begins with
    float offset[2];   // and what its minimum is multiplied with
};

// For each lane the largest output of one row in kLargestPanels panels, as a key (logit_keys.h).
constexpr int64_t kLargestPanels = 24;  // whole groups of panels in every product
struct Largest {
    int32_t keys[kLanes], outputs[kLanes], has_nan;
};

enum class SampleStatus : int32_t { good = 0, not_finite = 1, nothing_left = 2 };

// One row to sample: SAMPLE_ROW of octavo/kernels/sampling.py. In Python its bytes.
struct SampleRow {
    uint64_t seed;
    double top_p, min_p;
    float temperature;  // 0: the most likely token
    int32_t top_k;      // 0: all
    uint32_t choice, position;
    int32_t token_id;  // result
    SampleStatus status;
    int32_t is_masked, unused;
};

struct LinearArgs {
    const void* x;
    const void* packed;
    const float* bias;  // or null
    void* out;
    float* x_f32;  // scratch, linear_scratch() floats
    int64_t num_tokens, num_rows, num_cols;
    DType x_dtype, weight_dtype, out_dtype;
    SampleRow* draws = nullptr;  // or null: has the largest output of each row put there, and none in out
    Largest* largest = nullptr;  // scratch, where they are: [ceil(panels / kLargestPanels)][num_tokens]

    template <class Visitor>
    void describe(Visitor& v) {
        v.matrix("packed", packed, weight_dtype, num_rows, num_cols);
        describe_product(v);
    }

    template <class Visitor>
    void describe_product(Visitor& v) {
        v.rows(num_tokens);
        v.tensor("x", x, x_dtype, {num_tokens, num_cols});
        v.optional("bias", bias, {num_rows});
        v.optional("draws", draws, {num_tokens});
        if (!draws) v.tensor("out", out, out_dtype, {num_tokens, num_rows});
    }
};

// As LinearArgs, over a quantised matrix; weight_dtype says nothing. Activations are quantised too, or else widened.
struct LinearQuantizedArgs : LinearArgs {
    QuantizedForm form;
    bool int8_activations;
    QuantizedInput* x_int8;  // scratch, where they are: quantized_scratch() of them

    template <class Visitor>
    void describe(Visitor& v) {
        v.matrix("packed", packed, form, num_rows, num_cols);
        v.number("int8_activations", int8_activations);
        describe_product(v);
    }
};

struct RmsNormArgs {
    const void* x;
    float* residual;  // updated in place; or null
    const float* weight;
    void* out;
    int64_t num_tokens, hidden_size;
    float eps;
    DType x_dtype, out_dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.optional("residual", residual, {num_tokens, hidden_size});
        if (residual)
            v.tensor("x", x, x_dtype, {num_tokens, hidden_size});
        else
            v.tensor("x", x, DType::f32, {num_tokens, hidden_size});
        v.tensor("weight", weight, {hidden_size});
        v.number("eps", eps);
        v.tensor("out", out, out_dtype, {num_tokens, hidden_size});
    }
};

struct AddLayerNormArgs {
    const void* x;
    float* residual;  // updated in place
    const float* weight;
    const float* bias;
    void* out;
    int64_t num_tokens, hidden_size;
    float eps;
    DType x_dtype, out_dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.tensor("x", x, x_dtype, {num_tokens, hidden_size});
        v.tensor("residual", residual, {num_tokens, hidden_size});
        v.tensor("weight", weight, {hidden_size});
        v.tensor("bias", bias, {hidden_size});
        v.number("eps", eps);
        v.tensor("out", out, out_dtype, {num_tokens, hidden_size});
    }
};

struct GeluArgs {
    const void* x;
    void* out;
    int64_t count;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(count);
        v.flat("x", x, dtype, count);
        v.flat("out", out, dtype, count);
    }
};

struct MeanRowsArgs {
    const void* x;
    const int32_t* row_start;
    float* out;
    int64_t num_tokens, num_requests, hidden_size;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.requests(num_requests);
        v.tensor("x", x, dtype, {num_tokens, hidden_size});
        v.starts("row_start", row_start, num_requests, num_tokens);
        v.tensor("out", out, {num_requests, hidden_size});
    }
};

struct L2NormalizeArgs {
    const void* x;
    float* out;
    int64_t num_rows, hidden_size;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
        v.tensor("x", x, dtype, {num_rows, hidden_size});
        v.tensor("out", out, {num_rows, hidden_size});
    }
};

// Arguments of the gated activations, silu_mul and gelu_tanh_mul.
struct GatedArgs {
    const void* gate_up;
    void* out;
    int64_t num_tokens, size;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.tensor("out", out, dtype, {num_tokens, size});
        v.tensor("gate_up", gate_up, dtype, {num_tokens, 2 * size});
    }
};

struct ScaleArgs {
    const float* x;
    float* out;
    int64_t count;
    float factor;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(count);
        v.flat("x", x, count);
        v.number("factor", factor);
        v.flat("out", out, count);
    }
};

struct GatherRowsArgs {
    const void* x;  // elements of any kind
    const int32_t* indices;
    void* out;
    int64_t num_x_rows, num_rows, num_cols, item_bytes;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
        v.any("x", x, item_bytes, {num_x_rows, num_cols});
        v.indices("indices", indices, num_rows, num_x_rows);
        v.any("out", out, item_bytes, {num_rows, num_cols});
    }
};

// A layer's cache: [num_blocks, num_kv_heads, 2 (keys, values), block_size / 16] tiles, as kv_tile.h says. Of the types
// above, a cache alone may be int8 or f8; a key's or a value's scale then adds four bytes to its head_dim.
struct KVCache {
    void* data;
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    DType dtype;
};

struct RopeWriteKVArgs {
    const void* qkv;
    const int32_t* positions;
    const float* cos_sin;
    const int32_t* slot_mapping;
    const float* q_norm;  // weight of an RMS norm of each query head before it is rotated; or null
    const float* k_norm;  // and of each key head
    float norm_eps;
    void* q_out;
    KVCache cache;
    int64_t num_tokens, num_heads, max_positions;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.number("num_heads", num_heads);
        v.number("num_kv_heads", cache.num_kv_heads);
        v.tensor("cos_sin", cos_sin, {max_positions, cache.head_dim});
        v.cache("kv_cache", cache);
        v.tensor("qkv", qkv, dtype, {num_tokens, (num_heads + 2 * cache.num_kv_heads) * cache.head_dim});
        v.indices("positions", positions, num_tokens, max_positions);
        v.indices("slot_mapping", slot_mapping, num_tokens, cache.num_blocks * cache.block_size);
        v.optional("q_norm", q_norm, {cache.head_dim});
        v.optional("k_norm", k_norm, {cache.head_dim});
        v.number("norm_eps", norm_eps);
        v.tensor("out", q_out, dtype, {num_tokens, num_heads, cache.head_dim});
    }
};

// Stores keys and values as they are.
struct WriteKVArgs {
    const void* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] dtype
    const int32_t* slot_mapping;
    KVCache cache;  // dtype too
    int64_t num_tokens, num_heads;
};

// One unit of attention: rows [first_row, first_row + num_rows) of (request, kv_head), where row = query * group + head
// in the group. `partition` is -1 for all partitions, else the partition whose partial result goes to `partial`.
struct AttentionUnit {
    int32_t request, kv_head, first_row, num_rows, partition;
    int64_t partial;
};

struct AttentionArgs {
    const void* q;  // tokens lie q_stride elements apart
    KVCache cache;
    const int32_t* block_table;
    const int32_t* query_start;
    const int32_t* seq_lens;
    void* out;
    int64_t num_tokens, num_requests, max_blocks, num_heads, q_stride;
    float scale;
    int64_t window;
    DType dtype;
    bool causal;  // else every query sees all its request's tokens
    // Planned by ops.cpp, in scratch memory. A partial result is head_dim sums, then the maximum, then the denominator.
    const AttentionUnit* units;
    const AttentionUnit* merges;
    float* partials;
    int64_t num_units, num_merges;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.requests(num_requests);
        v.tensor("q", q, dtype, {num_tokens, num_heads, cache.head_dim});
        v.cache("kv_cache", cache);
        v.shares("query heads", num_heads, "key-value heads", cache.num_kv_heads);
        v.tensor("block_table", block_table, {num_requests, max_blocks});
        v.tensor("query_start", query_start, {num_requests + 1});
        v.tensor("seq_lens", seq_lens, {num_requests});
        v.number("scale", scale);
        v.number("window", window);
        v.tensor("out", out, dtype, {num_tokens, num_heads * cache.head_dim});
        v.reads_blocks(*this);
    }
};

// Attention within each request, over keys and values that are kept in scratch memory only.
struct EncoderAttentionArgs {
    const void* qkv;
    const int32_t* query_start;
    void* out;
    int64_t num_tokens, num_requests, num_heads, head_dim;
    float scale;
    DType dtype;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_tokens);
        v.requests(num_requests);
        v.number("num_heads", num_heads);
        v.number("head_dim", head_dim);
        v.head_dim(head_dim);
        v.tensor("qkv", qkv, dtype, {num_tokens, 3 * num_heads * head_dim});
        v.starts("query_start", query_start, num_requests, num_tokens);
        v.number("scale", scale);
        v.tensor("out", out, dtype, {num_tokens, num_heads * head_dim});
    }
};

struct SampleArgs {
    float* logits;  // overwritten
    SampleRow* rows;
    const uint8_t* masks;  // of those that are masked: bit t % 8 of byte t / 8 says whether token t is allowed
    double* sums;          // scratch, a number for each row and block
    int64_t num_rows, vocab_size;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
        v.tensor("logits", logits, {num_rows, vocab_size});
        v.tensor("rows", rows, {num_rows});
        v.tensor("masks", masks, {num_rows, (vocab_size + 7) / 8});
    }
};

// What one unit of read_loop reads.
struct ReadSpan {
    const void* data;
    int64_t num_bytes;  // a multiple of kReadBytes
};

// Ops that are one kernel of the same name. What a kernel needs beside its arguments, ops.cpp prepares.
#define OCTAVO_KERNEL_OPS(OP)                       \
    OP(pack, PackArgs)                              \
    OP(pack_quantized, PackQuantizedArgs)           \
    OP(embedding, EmbeddingArgs)                    \
    OP(embedding_quantized, EmbeddingQuantizedArgs) \
    OP(linear, LinearArgs)                          \
    OP(rms_norm, RmsNormArgs)                       \
    OP(add_layer_norm, AddLayerNormArgs)            \
    OP(gelu, GeluArgs)                              \
    OP(silu_mul, GatedArgs)                         \
    OP(gelu_tanh_mul, GatedArgs)                    \
    OP(scale, ScaleArgs)                            \
    OP(gather_rows, GatherRowsArgs)                 \
    OP(mean_rows, MeanRowsArgs)                     \
    OP(l2_normalize, L2NormalizeArgs)               \
    OP(rope_write_kv, RopeWriteKVArgs)              \
    OP(paged_attention, AttentionArgs)              \
    OP(sample_rows, SampleArgs)

// Ops that ops.cpp makes of other kernels.
#define OCTAVO_COMPOSED_OPS(OP)               \
    OP(linear_quantized, LinearQuantizedArgs) \
    OP(encoder_attention, EncoderAttentionArgs)

#define OCTAVO_OPS(OP)    \
    OCTAVO_KERNEL_OPS(OP) \
    OCTAVO_COMPOSED_OPS(OP)

// What each instruction set has a function for.
#define OCTAVO_KERNELS(KERNEL)                      \
    OCTAVO_KERNEL_OPS(KERNEL)                       \
    KERNEL(linear_int8, LinearQuantizedArgs)        \
    KERNEL(linear_weight_only, LinearQuantizedArgs) \
    KERNEL(write_kv, WriteKVArgs)

// What each instruction set provides. No function throws; all of them run inside an OpScope.
struct OpTable {
    const char* name;
#define OCTAVO_ENTRY(name, Args) void (*name)(const Args&) noexcept;
    OCTAVO_KERNELS(OCTAVO_ENTRY)
#undef OCTAVO_ENTRY
    void (*fma_loop)(int64_t num_units, float* sink) noexcept;
    void (*read_loop)(const ReadSpan* spans, int64_t num_spans, float* sink) noexcept;
};

// Floats of scratch memory that `linear` needs.
int64_t linear_scratch(int64_t num_tokens, int64_t num_cols) noexcept;

// Elements of scratch memory that `linear_int8` needs.
int64_t quantized_scratch(int64_t num_tokens, int64_t num_cols) noexcept;

// Each runs an op with the active table: takes the pool, sets the floating-point mode, provides the scratch memory.
#define OCTAVO_DECLARE(name, Args) void name(Args args);
OCTAVO_OPS(OCTAVO_DECLARE)
#undef OCTAVO_DECLARE

// Ceilings, in seconds: num_units · kFmaSteps · 16 multiply-adds; a read of all spans; a fork and join of the pool.
double time_fma(int64_t num_units);
double time_read(const ReadSpan* spans, int64_t num_spans);
double time_fork_join(int64_t repeats);

}  // namespace octavo
