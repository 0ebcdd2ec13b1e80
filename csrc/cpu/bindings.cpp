// octavo.devices.cpu._cpu: the ops of ops.h's list, and what is not an op. An op takes tensors and numbers in the order of
// its description and gives nothing; call.h checks them, and the indices among them are checked to lead nowhere outside,
// else IndexError. The GIL is released while an op runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
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

int64_t number(nb::handle object, const nb::object& name) { return nb::cast<int64_t>(object.attr(name)); }

// Over the tables and arrays of octavo/devices/host_buffers.py, which it keeps alive.
class StepFiller {
public:
    // arrays: input_ids, positions, query_start, seq_lens, logits_rows. draws: bytes of SampleRows.
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
                  {},
                  {},
                  reinterpret_cast<SampleRow*>(draws.data()),
                  size(arrays.at(1), 0, 1),
                  size(arrays.at(3), 0, 1),
                  size(arrays.at(4), 0, 1)},
          kept_(std::move(arrays)),
          draws_(std::move(draws)) {
        if (draws_.shape(1) != sizeof(SampleRow)) throw nb::value_error("draws must be the bytes of SAMPLE_ROWs");
        for (const Int32Array& slots : slot_mappings) arrays_.slot_mappings.push_back(slots.data());
        for (const Int32Array& table : step_tables) {
            if (size(table, 1, 2) != tables_.row_blocks) throw nb::value_error("block tables differ in length");
            arrays_.block_tables.push_back(table.data());
        }
        kept_.insert(kept_.end(), slot_mappings.begin(), slot_mappings.end());
        kept_.insert(kept_.end(), step_tables.begin(), step_tables.end());
        kept_.insert(kept_.end(), {token_ids, block_tables});
    }

    // entries: ScheduledRequests of octavo/core/step.py, each of the request in this row.
    nb::tuple fill(const nb::list& rows, const nb::list& entries) {
        const size_t num_requests = rows.size();
        if (entries.size() != num_requests) throw nb::value_error("the lists have one entry for each row");
        requests_.clear();
        for (size_t i = 0; i < num_requests; ++i) {
            const nb::handle entry = entries[i];
            requests_.push_back({nb::cast<int64_t>(rows[i]), number(entry, first_position_), number(entry, num_tokens_),
                                 number(entry, num_logits_)});
        }
        const FilledStep step = fill_step(tables_, arrays_, requests_);
        return nb::make_tuple(step.num_tokens, num_requests, step.num_logits);
    }

    nb::tuple append() {
        nb::list accepted;
        bool are_good = true;
        int64_t first = 0;
        for (const ScheduledRequest& request : requests_) {
            if (!request.num_logits) continue;
            nb::list token_ids;
            const int64_t end = first + accept_draws(tables_, arrays_, request, first);
            for (int64_t j = first; j < end; ++j) token_ids.append(arrays_.draws[j].token_id);
            are_good &= arrays_.draws[end - 1].status == SampleStatus::good;
            accepted.append(token_ids);
            first += request.num_logits;
        }
        return nb::make_tuple(accepted, are_good);
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
    const nb::object first_position_ = nb::str("first_position"), num_tokens_ = nb::str("num_tokens"),
                     num_logits_ = nb::str("num_logits");
};

// The recordings of a model, of which a step replays those that it needs.
class StepReplay {
public:
    // The last three are null of a model that has no logits.
    StepReplay(const Recording* hidden_states, const Recording* logits, const Recording* draw_any,
               const Recording* draw_most_likely)
        : hidden_states_(hidden_states), logits_(logits), draw_any_(draw_any), draw_most_likely_(draw_most_likely) {}

    // size: a StepSize of octavo/devices/device.py, and a Draw.
    void run(nb::handle size, const std::string& draw) {
        const StepSize rows = {number(size, num_logits_), 0};
        runs_.assign(1, {hidden_states_, {number(size, num_tokens_), number(size, num_requests_)}});
        if (rows.num_rows && draw == "most_likely") runs_.push_back({draw_most_likely_, rows});
        else if (rows.num_rows && logits_) {
            runs_.push_back({logits_, rows});
            if (draw == "any") runs_.push_back({draw_any_, rows});
        }
        nb::gil_scoped_release release;
        Recording::replay(runs_);
    }

private:
    const Recording *hidden_states_, *logits_, *draw_any_, *draw_most_likely_;
    std::vector<Recording::Run> runs_;
    const nb::object num_tokens_ = nb::str("num_tokens"), num_requests_ = nb::str("num_requests"),
                     num_logits_ = nb::str("num_logits");
};

// Puts `num_bytes` of a file, to be read only, in the place of what lies at `start` in the pages of a mmap.mmap.
void bind_map_file(const nb::object& pages, int64_t start, int64_t num_bytes, int file, int64_t offset) {
    Py_buffer view;
    if (PyObject_GetBuffer(pages.ptr(), &view, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) nb::raise_python_error();
    const bool fits = start >= 0 && num_bytes > 0 && num_bytes <= view.len - start;
    char* address = static_cast<char*>(view.buf) + start;
    void* mapped = fits ? mmap(address, num_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, offset) : nullptr;
    const int error = errno;
    PyBuffer_Release(&view);
    if (!fits) throw nb::value_error("a file's bytes must lie within the pages that they replace");
    if (mapped != address) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        nb::raise_python_error();
    }
}

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
    nb::class_<StepReplay>(m, "StepReplay", "A captured model: one call computes a step.")
        .def(nb::init<const Recording*, const Recording*, const Recording*, const Recording*>(), nb::arg(),
             nb::arg() = nb::none(), nb::arg() = nb::none(), nb::arg() = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
        .def("run", &StepReplay::run, nb::arg("size"), nb::arg("draw") = "no");
    nb::class_<StepFiller>(m, "StepFiller", "Fills in a step's inputs from a batch's rows.")
        .def(nb::init<Int32Array, Int32Array, int64_t, std::vector<Int32Array>, std::vector<Int32Array>,
                      std::vector<Int32Array>, Bytes>())
        .def("fill", &StepFiller::fill)
        .def("append", &StepFiller::append);
    m.def("map_file", &bind_map_file,
          "Map (pages, start, bytes, file, offset): a file's bytes to be read in place of pages; OSError if it can't be.");
    m.attr("FMA_FLOPS") = 2 * kFmaSteps * kLanes;
    m.def("time_fma", &time_fma, nb::call_guard<nb::gil_scoped_release>(), "Seconds for n times FMA_FLOPS.");
    m.def("time_read", &bind_time_read,
          "Seconds to read buffers (address, bytes) once; an end of less than 256 bytes is left out.");
    m.def("time_fork_join", &time_fork_join, nb::call_guard<nb::gil_scoped_release>(),
          "Mean seconds of a fork and join.");
}
