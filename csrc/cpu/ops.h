// The ops as plain functions over pointers and sizes, and the table that an instruction set fills in.
// Nothing here has an inline body, so kernel files of different instruction sets may all include it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, f8 = 4 };

// Columns of the weight matrix in one packed panel; positions in one tile of keys. One vector of floats.
constexpr int64_t kLanes = 16;
// Most rows of x in one register tile of `linear`.
constexpr int64_t kMaxTileRows = 8;
// Likewise where activations are quantised.
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

struct PackArgs {
    const void* weight;  // [num_rows, num_cols] dtype
    void* packed;        // packed_size() elements, aligned to 64 bytes
    int64_t num_rows, num_cols;
    DType dtype;
};

// Columns that share a scale of their quantised activations, and lie together in a packed quantised matrix.
constexpr int64_t kQuantBlock = 32;

// Such columns of one row of activations.
struct QuantizedInput {
    int8_t values[kQuantBlock];
    float scale;
    float shift;       // takes what dot products begin with off again: see quantized.cpp
    int32_t start[2];  // for each group of weights: what its dot product with unsigned weights begins with
    float offset[2];   // and what its minimum is multiplied with
};

// How a matrix is quantised: w[n, k] = scale * (value - zero) - min, a scale (and min) for each `group` columns of a
// row. QuantizedForm of octavo/kernels/quantized.py.
struct QuantizedForm {
    int32_t bits;   // 4 or 8: values are unsigned
    int32_t group;  // 16 or 32
    int32_t zero;
    bool has_mins;
    bool wide_scales;  // float32 instead of float16; of the minima too
};

struct PackQuantizedArgs {
    const uint8_t* values;  // [num_rows, num_cols]
    const void* scales;     // [num_rows, ceil(num_cols / group)]
    const void* mins;       // likewise, or null
    void* packed;           // packed_quantized_bytes(), aligned to 64 bytes
    int64_t num_rows, num_cols;
    QuantizedForm form;
};

struct EmbeddingArgs {
    const int32_t* token_ids;  // [num_tokens]
    const void* packed;
    float* out;  // [num_tokens, num_cols]
    int64_t num_tokens, num_rows, num_cols;
    DType dtype;
};

struct EmbeddingQuantizedArgs {
    const int32_t* token_ids;  // [num_tokens]
    const void* packed;
    float* out;  // [num_tokens, num_cols]
    int64_t num_tokens, num_rows, num_cols;
    QuantizedForm form;
};

// Of one row and kLargestPanels panels of outputs: for each lane its largest, as a key (logit_keys.h).
constexpr int64_t kLargestPanels = 24;  // whole groups of panels in every product
struct Largest {
    int32_t keys[kLanes], outputs[kLanes], has_nan;
};

struct SampleRow;

struct LinearArgs {
    const void* x;  // [num_tokens, num_cols] x_dtype
    const void* packed;
    const float* bias;  // [num_rows] or null
    void* out;          // [num_tokens, num_rows] out_dtype
    float* x_f32;       // scratch, linear_scratch() floats
    int64_t num_tokens, num_rows, num_cols;
    DType x_dtype, weight_dtype, out_dtype;
    SampleRow* draws = nullptr;  // [num_tokens] or null: has the largest output of each row put there, and none in out
    Largest* largest = nullptr;  // scratch, where they are: [ceil(panels / kLargestPanels)][num_tokens]
};

// As LinearArgs, over a quantised matrix; weight_dtype says nothing. Activations are quantised too, or else widened.
struct LinearQuantizedArgs : LinearArgs {
    QuantizedForm form;
    bool int8_activations;
    QuantizedInput* x_int8;  // scratch, where they are: quantized_scratch() of them
};

struct RmsNormArgs {
    const void* x;    // [num_tokens, hidden_size]: f32 where residual is null, else x_dtype
    float* residual;  // [num_tokens, hidden_size], updated in place; or null
    const float* weight;
    void* out;  // [num_tokens, hidden_size] out_dtype
    int64_t num_tokens, hidden_size;
    float eps;
    DType x_dtype, out_dtype;
};

struct AddLayerNormArgs {
    const void* x;    // [num_tokens, hidden_size] x_dtype
    float* residual;  // [num_tokens, hidden_size], updated in place
    const float* weight;
    const float* bias;
    void* out;  // [num_tokens, hidden_size] out_dtype
    int64_t num_tokens, hidden_size;
    float eps;
    DType x_dtype, out_dtype;
};

struct GeluArgs {
    const void* x;  // [count] dtype
    void* out;      // [count] dtype
    int64_t count;
    DType dtype;
};

struct MeanRowsArgs {
    const void* x;             // [num_tokens, hidden_size] dtype
    const int32_t* row_start;  // [num_requests + 1]
    float* out;                // [num_requests, hidden_size]
    int64_t num_requests, hidden_size;
    DType dtype;
};

struct L2NormalizeArgs {
    const void* x;  // [num_rows, hidden_size] dtype
    float* out;     // [num_rows, hidden_size]
    int64_t num_rows, hidden_size;
    DType dtype;
};

// Of the gated activations: silu_mul and gelu_tanh_mul.
struct GatedArgs {
    const void* gate_up;  // [num_tokens, 2 * size] dtype
    void* out;            // [num_tokens, size] dtype
    int64_t num_tokens, size;
    DType dtype;
};

struct ScaleArgs {
    const float* x;  // [count]
    float* out;      // [count]
    int64_t count;
    float factor;
};

struct GatherRowsArgs {
    const void* x;
    const int32_t* indices;  // [num_rows]
    void* out;
    int64_t num_rows, row_bytes;
};

// A layer's cache: [num_blocks, num_kv_heads, 2 (keys, values), block_size / 16] tiles, as kv_tile.h says. Of the types
// above, a cache alone may be int8 or f8; a key's or a value's scale then adds four bytes to its head_dim.
struct KVCache {
    void* data;
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    DType dtype;
};

struct RopeWriteKVArgs {
    const void* qkv;           // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] dtype
    const int32_t* positions;  // [num_tokens]
    const float* cos_sin;      // [max_positions, head_dim]
    const int32_t* slot_mapping;
    const float* q_norm;  // [head_dim]: weight of an RMS norm of each query head before it is rotated; or null
    const float* k_norm;  // and of each key head
    float norm_eps;
    void* q_out;  // [num_tokens, num_heads, head_dim] dtype
    KVCache cache;
    int64_t num_tokens, num_heads, max_positions;
    DType dtype;
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
    const void* q;  // [num_tokens, num_heads, head_dim] dtype, tokens q_stride elements apart
    KVCache cache;
    const int32_t* block_table;  // [num_requests, max_blocks]
    const int32_t* query_start;  // [num_requests + 1]
    const int32_t* seq_lens;     // [num_requests]
    void* out;                   // [num_tokens, num_heads * head_dim] dtype
    int64_t num_requests, max_blocks, num_heads, q_stride;
    float scale;
    int64_t window;
    DType dtype;
    bool causal;  // else every query sees all its request's tokens
    // Planned by ops.cpp, in scratch memory. A partial result is head_dim sums, then the maximum, then the denominator.
    const AttentionUnit* units;
    const AttentionUnit* merges;
    float* partials;
    int64_t num_units, num_merges;
};

// Attention within each request, over keys and values that are kept in scratch memory only.
struct EncoderAttentionArgs {
    const void* qkv;             // [num_tokens, 3 * num_heads * head_dim] dtype
    const int32_t* query_start;  // [num_requests + 1]
    void* out;                   // [num_tokens, num_heads * head_dim] dtype
    int64_t num_tokens, num_requests, num_heads, head_dim;
    float scale;
    DType dtype;
};

enum class SampleStatus : int32_t { good = 0, not_finite = 1, nothing_left = 2 };

// One row to sample: SAMPLE_ROW of octavo/kernels/sampling.py.
struct SampleRow {
    uint64_t seed;
    const uint8_t* mask;  // bit t % 8 of byte t / 8: whether token t is allowed; or null
    double top_p, min_p;
    float temperature;  // 0: the most likely token
    int32_t top_k;      // 0: all
    uint32_t choice, position;
    int32_t token_id;  // result
    SampleStatus status;
};

struct SampleArgs {
    float* logits;  // [num_rows, vocab_size], overwritten
    SampleRow* rows;
    double* sums;  // scratch, a number for each row and block
    int64_t num_rows, vocab_size;
};

// What one unit of read_loop reads.
struct ReadSpan {
    const void* data;
    int64_t num_bytes;  // a multiple of kReadBytes
};

// What each instruction set provides. No function throws; all of them run inside an OpScope.
struct OpTable {
    const char* name;
    void (*pack)(const PackArgs&) noexcept;
    void (*embedding)(const EmbeddingArgs&) noexcept;
    void (*linear)(const LinearArgs&) noexcept;
    void (*pack_quantized)(const PackQuantizedArgs&) noexcept;
    void (*embedding_quantized)(const EmbeddingQuantizedArgs&) noexcept;
    void (*linear_int8)(const LinearQuantizedArgs&) noexcept;
    void (*linear_weight_only)(const LinearQuantizedArgs&) noexcept;
    void (*rms_norm)(const RmsNormArgs&) noexcept;
    void (*add_layer_norm)(const AddLayerNormArgs&) noexcept;
    void (*gelu)(const GeluArgs&) noexcept;
    void (*mean_rows)(const MeanRowsArgs&) noexcept;
    void (*l2_normalize)(const L2NormalizeArgs&) noexcept;
    void (*silu_mul)(const GatedArgs&) noexcept;
    void (*gelu_tanh_mul)(const GatedArgs&) noexcept;
    void (*scale)(const ScaleArgs&) noexcept;
    void (*gather_rows)(const GatherRowsArgs&) noexcept;
    void (*rope_write_kv)(const RopeWriteKVArgs&) noexcept;
    void (*write_kv)(const WriteKVArgs&) noexcept;
    void (*paged_attention)(const AttentionArgs&) noexcept;
    void (*sample_rows)(const SampleArgs&) noexcept;
    void (*fma_loop)(int64_t num_units, float* sink) noexcept;
    void (*read_loop)(const ReadSpan* spans, int64_t num_spans, float* sink) noexcept;
};

// Elements in the packed form of a [num_rows, num_cols] matrix.
int64_t packed_size(int64_t num_rows, int64_t num_cols, DType dtype) noexcept;

// Bytes of the packed form of a quantised matrix.
int64_t packed_quantized_bytes(int64_t num_rows, int64_t num_cols, const QuantizedForm& form) noexcept;

// Floats of scratch memory that `linear` needs.
int64_t linear_scratch(int64_t num_tokens, int64_t num_cols) noexcept;

// Elements of scratch memory that `linear_int8` needs.
int64_t quantized_scratch(int64_t num_tokens, int64_t num_cols) noexcept;

// Runs an op with the active table: takes the pool, sets the floating-point mode, provides the scratch memory.
void pack(PackArgs args);
void embedding(EmbeddingArgs args);
void linear(LinearArgs args);
void pack_quantized(PackQuantizedArgs args);
void embedding_quantized(EmbeddingQuantizedArgs args);
void linear_quantized(LinearQuantizedArgs args);
void rms_norm(RmsNormArgs args);
void add_layer_norm(AddLayerNormArgs args);
void gelu(GeluArgs args);
void mean_rows(MeanRowsArgs args);
void l2_normalize(L2NormalizeArgs args);
void silu_mul(GatedArgs args);
void gelu_tanh_mul(GatedArgs args);
void scale(ScaleArgs args);
void gather_rows(GatherRowsArgs args);
void rope_write_kv(RopeWriteKVArgs args);
void paged_attention(AttentionArgs args);
void encoder_attention(EncoderAttentionArgs args);
void sample_rows(SampleArgs args);

// Ceilings, in seconds: num_units · kFmaSteps · 16 multiply-adds; a read of all spans; a fork and join of the pool.
double time_fma(int64_t num_units);
double time_read(const ReadSpan* spans, int64_t num_spans);
double time_fork_join(int64_t repeats);

}  // namespace octavo
