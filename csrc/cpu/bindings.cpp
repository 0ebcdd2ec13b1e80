// octavo.devices.cpu._cpu: the ops of ops.h's list, and what is not an op. An op takes tensors and numbers in the order of
// its description and gives nothing; call.h checks them, and the indices among them are checked to lead nowhere outside,
// else IndexError. The GIL is released while an op runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "call.h"
#include "isa.h"
#include "ops.h"
#include "replay.h"
#include "step_inputs.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <class Args>
void bind_op(nb::module_& m, const char* name, void (*op)(Args)) {
    m.def(name, [name, op](const nb::args& arguments) {
        Args args = {};
        Call call(name, arguments, args);
        args.describe(call);
        call.end();
        RequireIndices indices;
        args.describe(indices);
        nb::gil_scoped_release release;
        op(args);
    });
}

// What the packed form of a matrix takes, in elements.
int64_t bind_packed_size(const nb::args& arguments) {
    PackArgs args = {};
    Call call("packed_size", arguments, args);
    call.tensor("weight", args.weight, args.dtype, {args.num_rows, args.num_cols});
    call.end();
    return packed_size(args.num_rows, args.num_cols, args.dtype);
}

// And that of a quantised one, in bytes.
int64_t bind_packed_quantized_bytes(const nb::args& arguments) {
    PackQuantizedArgs args = {};
    Call call("packed_quantized_bytes", arguments, args);
    call.form("form", args.form);
    call.tensor("values", args.values, {args.num_rows, args.num_cols});
    call.end();
    return packed_quantized_bytes(args.num_rows, args.num_cols, args.form);
}

void bind_replay(const std::vector<std::tuple<const Recording*, int64_t, int64_t>>& recordings) {
    nb::gil_scoped_release release;
    std::vector<Recording::Run> runs;
    for (const auto& [recording, num_rows, num_requests] : recordings)
        runs.push_back({recording, {num_rows, num_requests}});
    Recording::replay(runs);
}

using Int32Array = nb::ndarray<int32_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The tables and arrays of octavo/kernels/step_inputs.py, which it keeps alive.
class StepFiller {
public:
    // arrays: input_ids, positions, query_start, seq_lens, rows, logits_rows, sampled_rows. draws: bytes of SampleRows.
    StepFiller(Int32Array token_ids, Int32Array block_tables, int64_t block_size, std::vector<Int32Array> arrays,
               std::vector<Int32Array> slot_mappings, std::vector<Int32Array> step_tables, Bytes draws)
        : tables_{token_ids.data(),
                  block_tables.data(),
                  size(token_ids, 0, 2),
                  size(token_ids, 1, 2),
                  size(block_tables, 2, 3),
                  block_size},
          arrays_{arrays.at(0).data(),
                  arrays.at(1).data(),
                  arrays.at(2).data(),
                  arrays.at(3).data(),
                  arrays.at(4).data(),
                  arrays.at(5).data(),
                  arrays.at(6).data(),
                  {},
                  {},
                  reinterpret_cast<SampleRow*>(draws.data()),
                  size(arrays.at(1), 0, 1),
                  size(arrays.at(3), 0, 1),
                  size(step_tables.at(0), 1, 2)},
          kept_(std::move(arrays)),
          draws_(std::move(draws)) {
        if (draws_.shape(1) != sizeof(SampleRow)) throw nb::value_error("draws must be the bytes of SAMPLE_ROWs");
        for (const Int32Array& slots : slot_mappings) arrays_.slot_mappings.push_back(slots.data());
        for (const Int32Array& table : step_tables) arrays_.block_tables.push_back(table.data());
        kept_.insert(kept_.end(), slot_mappings.begin(), slot_mappings.end());
        kept_.insert(kept_.end(), step_tables.begin(), step_tables.end());
        kept_.insert(kept_.end(), {token_ids, block_tables});
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
    static int64_t size(const Int32Array& array, size_t axis, size_t ndim) {
        if (array.ndim() != ndim) throw nb::value_error("a table or array of a step has other dimensions");
        return static_cast<int64_t>(array.shape(axis));
    }

    BatchTables tables_;
    StepArrays arrays_;
    std::vector<Int32Array> kept_;
    Bytes draws_;
    std::vector<ScheduledRequest> requests_;
    int64_t num_sampled_ = 0;
};

// 64 KiB: small enough to share matrices evenly among the threads.
constexpr int64_t kSpanBytes = 256 * kReadBytes;

double bind_time_read(const std::vector<std::pair<uintptr_t, int64_t>>& buffers) {
    nb::gil_scoped_release release;
    std::vector<ReadSpan> spans;
    for (const auto& [data, num_bytes] : buffers) {
        const char *p = reinterpret_cast<const char*>(data), *end = p + num_bytes / kReadBytes * kReadBytes;
        for (; p < end; p += kSpanBytes) spans.push_back({p, std::min<int64_t>(kSpanBytes, end - p)});
    }
    return time_read(spans.data(), int64_t(spans.size()));
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.attr("ATTENTION_PARTITION") = kPartition;
    m.def("supported_isas", &supported_isas, "Instruction sets that this build has and this CPU executes.");
    m.def("isa", [] { return active_table().name; }, "The instruction set in use.");
    m.def("set_isa", &set_isa, nb::arg("name"), "Use another instruction set; ValueError if it is not supported.");
    m.def("num_threads", &num_threads);
    m.def("progress", &progress, "A number that changes while an op runs; for a watcher in another thread.");
    m.def("set_num_threads", &set_num_threads, nb::arg("n"), "Threads that share an op's work, the caller included.");
    m.def("packed_size", &bind_packed_size, "Elements that the packed form of a matrix takes.");
    m.def("packed_quantized_bytes", &bind_packed_quantized_bytes,
          "Bytes that the packed form of a matrix takes: of a form, with such values.");
    m.def("check_cache_sizes", &check_cache_sizes, "ValueError for a block size or head size that the kernels lack.");
#define OCTAVO_BIND(name, Args) bind_op<Args>(m, #name, &name);
    OCTAVO_OPS(OCTAVO_BIND)
    m.attr("QUANT_BLOCK") = kQuantBlock;
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
        .def(nb::init<Int32Array, Int32Array, int64_t, std::vector<Int32Array>, std::vector<Int32Array>,
                      std::vector<Int32Array>, Bytes>())
        .def("fill", &StepFiller::fill)
        .def("append", &StepFiller::append);
    m.attr("FMA_FLOPS") = 2 * kFmaSteps * kLanes;
    m.def("time_fma", &time_fma, nb::call_guard<nb::gil_scoped_release>(), "Seconds for n times FMA_FLOPS.");
    m.def("time_read", &bind_time_read,
          "Seconds to read buffers (address, bytes) once; an end of less than 256 bytes is left out.");
    m.def("time_fork_join", &time_fork_join, nb::call_guard<nb::gil_scoped_release>(),
          "Mean seconds of a fork and join.");
}
