// octavo.kernels._cpu: raw pointers and sizes in, nothing out. Shapes and dtypes are checked by octavo/kernels/cpu.py;
// here it is required that no index leads outside its tensor, else IndexError. The GIL is released while an op
// runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa.h"
#include "ops.h"
#include "replay.h"
#include "step_inputs.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Weights are streamed whole for every step: huge pages spare the address translation. Best effort.
void advise_huge_pages([[maybe_unused]] uintptr_t address, [[maybe_unused]] size_t num_bytes) {
#ifdef __linux__
    constexpr uintptr_t kHuge = uintptr_t{1} << 21;
    const uintptr_t first = (address + kHuge - 1) & ~(kHuge - 1), last = (address + num_bytes) & ~(kHuge - 1);
    if (first < last) madvise(pointer<void>(first), last - first, MADV_HUGEPAGE);
#endif
}

void bind_pack(uintptr_t weight, uintptr_t packed, int64_t num_rows, int64_t num_cols, int dtype) {
    const PackArgs args = {pointer<void>(weight), pointer<void>(packed), num_rows, num_cols, DType(dtype)};
    advise_huge_pages(packed, packed_size(num_rows, num_cols, args.dtype) * (args.dtype == DType::f32 ? 4 : 2));
    nb::gil_scoped_release release;
    pack(args);
}

void bind_embedding(uintptr_t token_ids, uintptr_t packed, uintptr_t out, int64_t num_tokens, int64_t num_rows,
                    int64_t num_cols, int dtype) {
    const EmbeddingArgs args = {pointer<int32_t>(token_ids),
                                pointer<void>(packed),
                                pointer<float>(out),
                                num_tokens,
                                num_rows,
                                num_cols,
                                DType(dtype)};
    require(IndexCheck{"token_ids", args.token_ids, num_tokens, num_rows});
    nb::gil_scoped_release release;
    embedding(args);
}

void bind_linear(uintptr_t x, uintptr_t packed, uintptr_t bias, uintptr_t out, int64_t num_tokens, int64_t num_rows,
                 int64_t num_cols, int x_dtype, int weight_dtype, int out_dtype, uintptr_t draws) {
    nb::gil_scoped_release release;
    linear({pointer<void>(x), pointer<void>(packed), pointer<float>(bias), pointer<void>(out), nullptr, num_tokens,
            num_rows, num_cols, DType(x_dtype), DType(weight_dtype), DType(out_dtype), pointer<SampleRow>(draws)});
}

void bind_pack_quantized(uintptr_t values, uintptr_t scales, uintptr_t mins, uintptr_t packed, int64_t num_rows,
                         int64_t num_cols, int bits, int group, int zero, int has_mins, int wide_scales) {
    const PackQuantizedArgs args = {pointer<uint8_t>(values),
                                    pointer<void>(scales),
                                    pointer<void>(mins),
                                    pointer<void>(packed),
                                    num_rows,
                                    num_cols,
                                    {bits, group, zero, has_mins != 0, wide_scales != 0}};
    advise_huge_pages(packed, packed_quantized_bytes(num_rows, num_cols, args.form));
    nb::gil_scoped_release release;
    pack_quantized(args);
}

void bind_embedding_quantized(uintptr_t token_ids, uintptr_t packed, uintptr_t out, int64_t num_tokens,
                              int64_t num_rows, int64_t num_cols, int bits, int group, int zero, int has_mins,
                              int wide_scales) {
    const EmbeddingQuantizedArgs args = {pointer<int32_t>(token_ids),
                                         pointer<void>(packed),
                                         pointer<float>(out),
                                         num_tokens,
                                         num_rows,
                                         num_cols,
                                         {bits, group, zero, has_mins != 0, wide_scales != 0}};
    require(IndexCheck{"token_ids", args.token_ids, num_tokens, num_rows});
    nb::gil_scoped_release release;
    embedding_quantized(args);
}

void bind_linear_quantized(uintptr_t x, uintptr_t packed, uintptr_t bias, uintptr_t out, int64_t num_tokens,
                           int64_t num_rows, int64_t num_cols, int bits, int group, int zero, int has_mins,
                           int wide_scales, int int8_activations, int x_dtype, int out_dtype, uintptr_t draws) {
    nb::gil_scoped_release release;
    linear_quantized({{pointer<void>(x), pointer<void>(packed), pointer<float>(bias), pointer<void>(out), nullptr,
                       num_tokens, num_rows, num_cols, DType(x_dtype), DType::f32, DType(out_dtype),
                       pointer<SampleRow>(draws)},
                      {bits, group, zero, has_mins != 0, wide_scales != 0},
                      int8_activations != 0,
                      nullptr});
}

void bind_rms_norm(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, int64_t num_tokens,
                   int64_t hidden_size, float eps, int x_dtype, int out_dtype) {
    nb::gil_scoped_release release;
    rms_norm({pointer<void>(x), pointer<float>(residual), pointer<float>(weight), pointer<void>(out), num_tokens,
              hidden_size, eps, DType(x_dtype), DType(out_dtype)});
}

void bind_add_layer_norm(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t out,
                         int64_t num_tokens, int64_t hidden_size, float eps, int x_dtype, int out_dtype) {
    nb::gil_scoped_release release;
    add_layer_norm({pointer<void>(x), pointer<float>(residual), pointer<float>(weight), pointer<float>(bias),
                    pointer<void>(out), num_tokens, hidden_size, eps, DType(x_dtype), DType(out_dtype)});
}

void bind_gelu(uintptr_t x, uintptr_t out, int64_t count, int dtype) {
    nb::gil_scoped_release release;
    gelu({pointer<void>(x), pointer<void>(out), count, DType(dtype)});
}

void bind_mean_rows(uintptr_t x, uintptr_t row_start, uintptr_t out, int64_t num_tokens, int64_t num_requests,
                    int64_t hidden_size, int dtype) {
    const MeanRowsArgs args = {pointer<void>(x), pointer<int32_t>(row_start), pointer<float>(out), num_requests,
                               hidden_size,      DType(dtype)};
    require(StartsCheck{"row_start", args.row_start, num_requests, num_tokens});
    nb::gil_scoped_release release;
    mean_rows(args);
}

void bind_l2_normalize(uintptr_t x, uintptr_t out, int64_t num_rows, int64_t hidden_size, int dtype) {
    nb::gil_scoped_release release;
    l2_normalize({pointer<void>(x), pointer<float>(out), num_rows, hidden_size, DType(dtype)});
}

void bind_encoder_attention(uintptr_t qkv, uintptr_t query_start, uintptr_t out, int64_t num_tokens,
                            int64_t num_requests, int64_t num_heads, int64_t head_dim, float scale, int dtype) {
    const EncoderAttentionArgs args = {pointer<void>(qkv),
                                       pointer<int32_t>(query_start),
                                       pointer<void>(out),
                                       num_tokens,
                                       num_requests,
                                       num_heads,
                                       head_dim,
                                       scale,
                                       DType(dtype)};
    require(StartsCheck{"query_start", args.query_start, num_requests, num_tokens});
    nb::gil_scoped_release release;
    encoder_attention(args);
}

void bind_silu_mul(uintptr_t gate_up, uintptr_t out, int64_t num_tokens, int64_t size, int dtype) {
    nb::gil_scoped_release release;
    silu_mul({pointer<void>(gate_up), pointer<void>(out), num_tokens, size, DType(dtype)});
}

void bind_gelu_tanh_mul(uintptr_t gate_up, uintptr_t out, int64_t num_tokens, int64_t size, int dtype) {
    nb::gil_scoped_release release;
    gelu_tanh_mul({pointer<void>(gate_up), pointer<void>(out), num_tokens, size, DType(dtype)});
}

void bind_scale(uintptr_t x, uintptr_t out, int64_t count, float factor) {
    nb::gil_scoped_release release;
    scale({pointer<float>(x), pointer<float>(out), count, factor});
}

void bind_gather_rows(uintptr_t x, uintptr_t indices, uintptr_t out, int64_t num_x_rows, int64_t num_rows,
                      int64_t row_bytes) {
    const GatherRowsArgs args = {pointer<void>(x), pointer<int32_t>(indices), pointer<void>(out), num_rows, row_bytes};
    require(IndexCheck{"indices", args.indices, num_rows, num_x_rows});
    nb::gil_scoped_release release;
    gather_rows(args);
}

void bind_rope_write_kv(uintptr_t qkv, uintptr_t positions, uintptr_t cos_sin, uintptr_t slot_mapping, uintptr_t q_norm,
                        uintptr_t k_norm, float norm_eps, uintptr_t q_out, uintptr_t cache, int64_t num_blocks,
                        int64_t num_kv_heads, int64_t block_size, int64_t head_dim, int cache_dtype,
                        int64_t num_tokens, int64_t num_heads, int64_t max_positions, int dtype) {
    const RopeWriteKVArgs args = {
        pointer<void>(qkv),
        pointer<int32_t>(positions),
        pointer<float>(cos_sin),
        pointer<int32_t>(slot_mapping),
        pointer<float>(q_norm),
        pointer<float>(k_norm),
        norm_eps,
        pointer<void>(q_out),
        {pointer<void>(cache), num_blocks, num_kv_heads, block_size, head_dim, DType(cache_dtype)},
        num_tokens,
        num_heads,
        max_positions,
        DType(dtype)};
    require(IndexCheck{"positions", args.positions, num_tokens, max_positions});
    require(IndexCheck{"slot_mapping", args.slot_mapping, num_tokens, num_blocks * block_size});
    nb::gil_scoped_release release;
    rope_write_kv(args);
}

void bind_paged_attention(uintptr_t q, uintptr_t cache, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                          int64_t head_dim, int cache_dtype, uintptr_t block_table, uintptr_t query_start,
                          uintptr_t seq_lens, uintptr_t out, int64_t num_tokens, int64_t num_requests,
                          int64_t max_blocks, int64_t num_heads, float scale, int64_t window, int dtype) {
    AttentionArgs args = {};
    args.q = pointer<void>(q);
    args.cache = {pointer<void>(cache), num_blocks, num_kv_heads, block_size, head_dim, DType(cache_dtype)};
    args.block_table = pointer<int32_t>(block_table);
    args.query_start = pointer<int32_t>(query_start);
    args.seq_lens = pointer<int32_t>(seq_lens);
    args.out = pointer<void>(out);
    args.num_requests = num_requests;
    args.max_blocks = max_blocks;
    args.num_heads = num_heads;
    args.q_stride = num_heads * head_dim;
    args.causal = true;
    args.scale = scale;
    args.window = window;
    args.dtype = DType(dtype);
    require(AttentionCheck{args.block_table, args.query_start, args.seq_lens, num_requests, num_tokens, max_blocks,
                           num_blocks, block_size, window});
    nb::gil_scoped_release release;
    paged_attention(args);
}

void bind_replay(const std::vector<std::tuple<const Recording*, int64_t, int64_t>>& recordings) {
    nb::gil_scoped_release release;
    std::vector<Recording::Run> runs;
    for (const auto& [recording, num_rows, num_requests] : recordings)
        runs.push_back({recording, {num_rows, num_requests}});
    Recording::replay(runs);
}

// The tables and arrays of octavo/kernels/step_inputs.py, by address; CpuOps.step_filler keeps them alive.
class StepFiller {
public:
    StepFiller(uintptr_t token_ids, uintptr_t block_tables, int64_t num_rows, int64_t row_tokens, int64_t row_blocks,
               int64_t block_size, const std::vector<uintptr_t>& arrays, const std::vector<uintptr_t>& slot_mappings,
               const std::vector<uintptr_t>& step_tables, uintptr_t draws, int64_t num_tokens, int64_t num_requests,
               int64_t step_blocks)
        : tables_{pointer<int32_t>(token_ids), pointer<int32_t>(block_tables), num_rows, row_tokens, row_blocks,
                  block_size},
          arrays_{pointer<int32_t>(arrays.at(0)), pointer<int32_t>(arrays.at(1)), pointer<int32_t>(arrays.at(2)),
                  pointer<int32_t>(arrays.at(3)), pointer<int32_t>(arrays.at(4)), pointer<int32_t>(arrays.at(5)),
                  pointer<int32_t>(arrays.at(6)), {}, {}, pointer<SampleRow>(draws), num_tokens, num_requests,
                  step_blocks} {
        for (const uintptr_t address : slot_mappings) arrays_.slot_mappings.push_back(pointer<int32_t>(address));
        for (const uintptr_t address : step_tables) arrays_.block_tables.push_back(pointer<int32_t>(address));
    }

    nb::tuple fill(const nb::list& rows, const nb::list& num_computed, const nb::list& num_scheduled,
                   const nb::list& samples) {
        const size_t num_requests = rows.size();
        if (num_computed.size() != num_requests || num_scheduled.size() != num_requests ||
            samples.size() != num_requests)
            throw nb::value_error("the lists have one entry for each row");
        requests_.clear();
        for (size_t i = 0; i < num_requests; ++i)
            requests_.push_back({nb::cast<int64_t>(rows[i]), nb::cast<int64_t>(num_computed[i]),
                                 nb::cast<int64_t>(num_scheduled[i]), nb::cast<bool>(samples[i])});
        const FilledStep step = fill_step(tables_, arrays_, requests_);
        num_sampled_ = step.num_sampled;
        return nb::make_tuple(step.num_tokens, step.num_sampled, step.num_blocks);
    }

    nb::tuple append() {
        const bool are_good = append_tokens(tables_, arrays_, num_sampled_);
        nb::list token_ids;
        for (int64_t s = 0; s < num_sampled_; ++s) token_ids.append(arrays_.draws[s].token_id);
        return nb::make_tuple(token_ids, are_good);
    }

private:
    BatchTables tables_;
    StepArrays arrays_;
    std::vector<ScheduledRequest> requests_;
    int64_t num_sampled_ = 0;
};

// A contiguous array of the host, as long as this lives.
class Buffer {
public:
    explicit Buffer(const nb::object& array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) nb::raise_python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    const Py_buffer* operator->() const { return &view_; }

private:
    Py_buffer view_;
};

void bind_sample_rows(const nb::object& logits, const nb::object& rows) {
    const Buffer values(logits), numbers(rows);
    if (values->ndim != 2 || values->itemsize != sizeof(float) || numbers->ndim != 1 ||
        numbers->itemsize != sizeof(SampleRow) || numbers->shape[0] != values->shape[0])
        throw nb::value_error("logits must be [S, V] float32 and rows [S] SAMPLE_ROW");
    const SampleArgs args = {static_cast<float*>(values->buf), static_cast<SampleRow*>(numbers->buf), nullptr,
                             values->shape[0], values->shape[1]};
    nb::gil_scoped_release release;
    sample_rows(args);
}

// 64 KiB: small enough to share matrices evenly among the threads.
constexpr int64_t kSpanBytes = 256 * kReadBytes;

double bind_time_read(const std::vector<std::pair<uintptr_t, int64_t>>& buffers) {
    nb::gil_scoped_release release;
    std::vector<ReadSpan> spans;
    for (const auto& [data, num_bytes] : buffers) {
        const char *p = pointer<char>(data), *end = p + num_bytes / kReadBytes * kReadBytes;
        for (; p < end; p += kSpanBytes) spans.push_back({p, std::min<int64_t>(kSpanBytes, end - p)});
    }
    return time_read(spans.data(), int64_t(spans.size()));
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.attr("ATTENTION_PARTITION") = kPartition;
    m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    m.def("supported_isas", &supported_isas, "Instruction sets that this build has and this CPU executes.");
    m.def("isa", [] { return active_table().name; }, "The instruction set in use.");
    m.def("set_isa", &set_isa, nb::arg("name"), "Use another instruction set; ValueError if it is not supported.");
    m.def("num_threads", &num_threads);
    m.def("progress", &progress, "A number that changes while an op runs; for a watcher in another thread.");
    m.def("set_num_threads", &set_num_threads, nb::arg("n"), "Threads that share an op's work, the caller included.");
    m.def("packed_size",
          [](int64_t num_rows, int64_t num_cols, int dtype) { return packed_size(num_rows, num_cols, DType(dtype)); });
    m.def("pack", &bind_pack);
    m.def("embedding", &bind_embedding);
    m.def("linear", &bind_linear);
    m.attr("QUANT_BLOCK") = kQuantBlock;
    m.def("packed_quantized_bytes",
          [](int64_t num_rows, int64_t num_cols, int bits, int group, int zero, int has_mins, int wide_scales) {
              return packed_quantized_bytes(num_rows, num_cols, {bits, group, zero, has_mins != 0, wide_scales != 0});
          });
    m.def("pack_quantized", &bind_pack_quantized);
    m.def("embedding_quantized", &bind_embedding_quantized);
    m.def("linear_quantized", &bind_linear_quantized);
    m.def("rms_norm", &bind_rms_norm);
    m.def("add_layer_norm", &bind_add_layer_norm);
    m.def("gelu", &bind_gelu);
    m.def("mean_rows", &bind_mean_rows);
    m.def("l2_normalize", &bind_l2_normalize);
    m.def("silu_mul", &bind_silu_mul);
    m.def("gelu_tanh_mul", &bind_gelu_tanh_mul);
    m.def("scale", &bind_scale);
    m.def("gather_rows", &bind_gather_rows);
    m.def("rope_write_kv", &bind_rope_write_kv);
    m.def("paged_attention", &bind_paged_attention);
    m.def("encoder_attention", &bind_encoder_attention);
    m.def("sample_rows", &bind_sample_rows);
    m.attr("SAMPLE_ROW_BYTES") = sizeof(SampleRow);
    nb::class_<Recording>(m, "Recording", "Ops that are replayed by one call; recorded for the most rows and requests.")
        .def("__init__", [](Recording* self, int64_t num_rows, int64_t num_requests) {
            new (self) Recording({num_rows, num_requests});
        })
        .def("begin", &Recording::begin, "Ops that this thread calls from now on are recorded, not run.")
        .def("end", [](Recording&) { Recording::end(); })
        .def("__len__", &Recording::num_ops);
    m.def("replay", &bind_replay,
          "Run all ops of each (recording, rows, requests); IndexError for an index outside its tensor.");
    nb::class_<StepFiller>(m, "StepFiller", "Fills in a step's inputs from a batch's rows.")
        .def(nb::init<uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, const std::vector<uintptr_t>&,
                      const std::vector<uintptr_t>&, const std::vector<uintptr_t>&, uintptr_t, int64_t, int64_t,
                      int64_t>())
        .def("fill", &StepFiller::fill)
        .def("append", &StepFiller::append);
    m.attr("FMA_FLOPS") = 2 * kFmaSteps * kLanes;
    m.def("time_fma", &time_fma, nb::call_guard<nb::gil_scoped_release>(), "Seconds for n times FMA_FLOPS.");
    m.def("time_read", &bind_time_read,
          "Seconds to read buffers (address, bytes) once; an end of less than 256 bytes is left out.");
    m.def("time_fork_join", &time_fork_join, nb::call_guard<nb::gil_scoped_release>(),
          "Mean seconds of a fork and join.");
}
