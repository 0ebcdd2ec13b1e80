#include "simd.h"

namespace octavo::OCTAVO_ISA {

#define OCTAVO_NAME_(name) #name
#define OCTAVO_NAME(name) OCTAVO_NAME_(name)

void pack(const PackArgs&) noexcept;
void embedding(const EmbeddingArgs&) noexcept;
void linear(const LinearArgs&) noexcept;
void pack_quantized(const PackQuantizedArgs&) noexcept;
void embedding_quantized(const EmbeddingQuantizedArgs&) noexcept;
void linear_int8(const LinearQuantizedArgs&) noexcept;
void linear_weight_only(const LinearQuantizedArgs&) noexcept;
void rms_norm(const RmsNormArgs&) noexcept;
void add_layer_norm(const AddLayerNormArgs&) noexcept;
void gelu(const GeluArgs&) noexcept;
void mean_rows(const MeanRowsArgs&) noexcept;
void l2_normalize(const L2NormalizeArgs&) noexcept;
void silu_mul(const GatedArgs&) noexcept;
void gelu_tanh_mul(const GatedArgs&) noexcept;
void scale(const ScaleArgs&) noexcept;
void gather_rows(const GatherRowsArgs&) noexcept;
void rope_write_kv(const RopeWriteKVArgs&) noexcept;
void write_kv(const WriteKVArgs&) noexcept;
void paged_attention(const AttentionArgs&) noexcept;
void sample_rows(const SampleArgs&) noexcept;
void fma_loop(int64_t num_units, float* sink) noexcept;
void read_loop(const ReadSpan* spans, int64_t num_spans, float* sink) noexcept;

extern const OpTable table;
const OpTable table = {
    OCTAVO_NAME(OCTAVO_ISA), pack,          embedding,          linear,          pack_quantized,
    embedding_quantized,     linear_int8,   linear_weight_only, rms_norm,        add_layer_norm,
    gelu,                    mean_rows,     l2_normalize,       silu_mul,        gelu_tanh_mul,
    scale,                   gather_rows,   rope_write_kv,      write_kv,        paged_attention,
    sample_rows,             fma_loop,      read_loop,
};

}  // namespace octavo::OCTAVO_ISA
