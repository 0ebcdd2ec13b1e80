// Recorded steps: ops with their arguments, run again by one call with other counts of rows and requests; and the
// checks that no index leads outside its tensor, made once for each replay however many layers share them.
#pragma once

#include <functional>
#include <utility>
#include <variant>
#include <vector>

#include "ops.h"
#include "thread_pool.h"

namespace octavo {

// What varies between replays. Rows are tokens, or whatever else all ops of a recording have one row for.
struct StepSize {
    int64_t num_rows, num_requests;
};

// Each value in [0, limit).
struct IndexCheck {
    const char* name;
    const int32_t* values;
    int64_t num_rows, limit;
    bool operator==(const IndexCheck&) const = default;
};

// From 0 to num_rows, never falling.
struct StartsCheck {
    const char* name;
    const int32_t* starts;  // [num_requests + 1]
    int64_t num_requests, num_rows;
    bool operator==(const StartsCheck&) const = default;
};

// Every block that attention will read is in the cache.
struct AttentionCheck {
    const int32_t* block_table;  // [num_requests, max_blocks]
    const int32_t* query_start;  // [num_requests + 1]
    const int32_t* seq_lens;     // [num_requests]
    int64_t num_requests, num_rows, max_blocks, num_blocks, block_size, window;
    bool operator==(const AttentionCheck&) const = default;
};

using Check = std::variant<IndexCheck, StartsCheck, AttentionCheck>;

// Throws std::out_of_range for a check that fails. While this thread records, keeps it for the replays instead.
void require(const Check& check);

// Invariants: between begin() and end() ops that this thread calls are added, not run; what their pointers lead to
// outlives the recording. Every count was recorded for `most`, and is scaled down from there.
class Recording {
public:
    using Op = std::function<void(OpScope&, const Recording&, StepSize)>;
    // A matrix that an op reads from its beginning to its end, if any.
    struct Matrix {
        const void* data;
        int64_t num_bytes;
    };

    explicit Recording(StepSize most) : most_(most) {}
    void begin();
    static void end();
    static Recording* current();  // this thread's, or null

    void add(Op op, Matrix matrix) { ops_.push_back({std::move(op), matrix}); }
    void add(const Check& check);
    int64_t num_ops() const { return static_cast<int64_t>(ops_.size()); }

    // A recording and what it is to be replayed for.
    struct Run {
        const Recording* recording;
        StepSize size;
    };
    // One after the other. Throws std::out_of_range, before any op runs, for more than was recorded and for an index that
    // leads outside its tensor.
    static void replay(const std::vector<Run>& runs);

    // `args` for `size` rows and requests.
    template <class Args>
    Args resized(Args args, StepSize size) const;
    // Throws std::logic_error unless the counts in `args` are multiples of what the recording is for.
    template <class Args>
    void check_counts(Args args) const;

private:
    struct Entry {
        Op op;
        Matrix matrix;
    };

    void check(StepSize size) const;

    StepSize most_;
    std::vector<Entry> ops_;
    std::vector<Check> checks_;
};

// The counts that vary, in each op's arguments.
struct Counts {
    int64_t* rows;
    int64_t* requests;
};
Counts counts(EmbeddingArgs&);
Counts counts(LinearArgs&);
Counts counts(EmbeddingQuantizedArgs&);
Counts counts(LinearQuantizedArgs&);
Counts counts(RmsNormArgs&);
Counts counts(AddLayerNormArgs&);
Counts counts(GeluArgs&);
Counts counts(MeanRowsArgs&);
Counts counts(L2NormalizeArgs&);
Counts counts(GatedArgs&);
Counts counts(ScaleArgs&);
Counts counts(GatherRowsArgs&);
Counts counts(RopeWriteKVArgs&);
Counts counts(AttentionArgs&);
Counts counts(EncoderAttentionArgs&);
Counts counts(SampleArgs&);
Counts counts(IndexCheck&);
Counts counts(StartsCheck&);
Counts counts(AttentionCheck&);

void check_multiple(int64_t count, int64_t most);

// What the product multiplies with; of other ops nothing.
Recording::Matrix matrix_of(const LinearArgs& args);
Recording::Matrix matrix_of(const LinearQuantizedArgs& args);
template <class Args>
Recording::Matrix matrix_of(const Args&) {
    return {};
}

template <class Args>
Args Recording::resized(Args args, StepSize size) const {
    const Counts c = counts(args);
    if (c.rows) *c.rows = *c.rows / most_.num_rows * size.num_rows;
    if (c.requests) *c.requests = *c.requests / most_.num_requests * size.num_requests;
    return args;
}

template <class Args>
void Recording::check_counts(Args args) const {
    const Counts c = counts(args);
    if (c.rows) check_multiple(*c.rows, most_.num_rows);
    if (c.requests) check_multiple(*c.requests, most_.num_requests);
}

// Runs an op: takes the pool and sets the floating-point mode. While this thread records, keeps it instead.
template <class Args>
void run(const Args& args, void (*op)(OpScope&, Args)) {
    if (Recording* recording = Recording::current()) {
        recording->check_counts(args);
        const auto resized = [args, op](OpScope& scope, const Recording& self, StepSize size) {
            op(scope, self.resized(args, size));
        };
        recording->add(resized, matrix_of(args));
        return;
    }
    OpScope scope;
    op(scope, args);
}

}  // namespace octavo
