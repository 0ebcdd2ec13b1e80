// Recorded steps: ops with their arguments, run again by one call for other counts of rows and requests; and the checks
// that no index leads outside its tensor, made once for each replay however many layers share them.
//
//   record:  op(args)  ->  Entry: a copy of args, made for `most` rows and requests
//            indices   ->  Check, unless an equal one is there already
//   replay:  all checks for this step's counts, then all entries in order: the op with args whose counts are scaled
//
// Only counts differ between replays. Addresses are stored as they were: whoever records keeps that memory alive,
// writes the inputs of the next step into it, and finds the results in it (devices/cpu/replay.py has the arena for
// them).
#pragma once

#include <functional>
#include <utility>
#include <variant>
#include <vector>

#include "describe.h"
#include "thread_pool.h"

namespace octavo {

// What varies between replays. Rows are tokens, or whatever else all ops of a recording have one row for.
struct StepSize {
    int64_t num_rows, num_requests;
};

// Each value is in [0, limit).
struct IndexCheck {
    const char* name;
    const int32_t* values;
    int64_t num_rows, limit;
    bool operator==(const IndexCheck&) const = default;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
    }
};

// The values run from 0 to num_rows and never fall.
struct StartsCheck {
    const char* name;
    const int32_t* starts;  // [num_requests + 1]
    int64_t num_requests, num_rows;
    bool operator==(const StartsCheck&) const = default;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
        v.requests(num_requests);
    }
};

// Every block that attention will read is in the cache.
struct AttentionCheck {
    const int32_t* block_table;  // [num_requests, max_blocks]
    const int32_t* query_start;  // [num_requests + 1]
    const int32_t* seq_lens;     // [num_requests]
    int64_t num_requests, num_rows, max_blocks, num_blocks, block_size, window;
    bool operator==(const AttentionCheck&) const = default;

    template <class Visitor>
    void describe(Visitor& v) {
        v.rows(num_rows);
        v.requests(num_requests);
    }
};

using Check = std::variant<IndexCheck, StartsCheck, AttentionCheck>;

// Throws std::out_of_range for a check that fails. While this thread records, keeps it for the replays instead.
void require(const Check& check);

// Requires what an op's description says of its indices.
struct RequireIndices : Ignore {
    void indices(const char* name, const int32_t*& values, int64_t& count, int64_t limit) {
        require(IndexCheck{name, values, count, limit});
    }
    void starts(const char* name, const int32_t*& starts, int64_t& num_requests, int64_t& num_rows) {
        require(StartsCheck{name, starts, num_requests, num_rows});
    }
    void reads_blocks(const AttentionArgs& a) {
        require(AttentionCheck{a.block_table, a.query_start, a.seq_lens, a.num_requests, a.num_tokens, a.max_blocks,
                               a.cache.num_blocks, a.cache.block_size, a.window});
    }
};

// Scales the counts that vary: what is one for each of `most` becomes one for each of `now`.
class Resize : public Ignore {
public:
    Resize(StepSize most, StepSize now) : most_(most), now_(now) {}
    void rows(int64_t& count) { count = count / most_.num_rows * now_.num_rows; }
    void requests(int64_t& count) { count = count / most_.num_requests * now_.num_requests; }

private:
    StepSize most_, now_;
};

// Throws std::logic_error for a count that `Resize` could not scale: one that is no multiple of what a recording is
// for.
class RequireMultiples : public Ignore {
public:
    explicit RequireMultiples(StepSize most) : most_(most) {}
    void rows(int64_t& count) { require(count, most_.num_rows); }
    void requests(int64_t& count) { require(count, most_.num_requests); }

private:
    static void require(int64_t count, int64_t most);
    StepSize most_;
};

// Invariants: between begin() and end() ops that this thread calls are added, not run. Every count in an entry or a
// check is a multiple of `most`, for which it was recorded, and is scaled down from there.
class Recording {
public:
    using Op = std::function<void(OpScope&, const Recording&, StepSize)>;
    // A matrix that an op reads from its beginning to its end, or null.
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
    // Replays one recording after the other. Throws std::out_of_range, before any op runs, for more than was recorded
    // and for an index that leads outside its tensor. While an op runs, waiting threads fetch the matrix of the next
    // that has one, across the recordings.
    static void replay(const std::vector<Run>& runs);

    // `args` for `size` rows and requests.
    template <class Args>
    Args resized(Args args, StepSize size) const {
        Resize resize(most_, size);
        args.describe(resize);
        return args;
    }
    template <class Args>
    void require_multiples(Args args) const {
        RequireMultiples multiples(most_);
        args.describe(multiples);
    }

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

// The matrix that an op reads whole; most ops read none.
Recording::Matrix matrix_of(const LinearArgs& args);
Recording::Matrix matrix_of(const LinearQuantizedArgs& args);
template <class Args>
Recording::Matrix matrix_of(const Args&) {
    return {};
}

// Runs an op: takes the pool and sets the floating-point mode. While this thread records, keeps the op instead.
template <class Args>
void run(const Args& args, void (*op)(OpScope&, Args)) {
    if (Recording* recording = Recording::current()) {
        recording->require_multiples(args);
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
