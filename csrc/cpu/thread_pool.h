// The persistent pool of threads that every op runs on, and OpScope, what one op at a time owns: the pool, the
// floating-point mode and scratch memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

// Calls fn(context, unit) for each unit in [0, num_units), on any thread and in any order. Returns when all are done.
// It may be called inside an OpScope only, and never from within fn.
void parallel_for(int64_t num_units, void (*fn)(const void* context, int64_t unit) noexcept,
                  const void* context) noexcept;

// How many threads share an op's units, the caller included.
int num_threads();

// A number that changes whenever a thread claims units, readable from any thread at any time.
uint64_t progress();

// Starts or ends threads of the pool, so that n threads share the units, the caller included. It is 1 at first. Throws
// std::invalid_argument for n < 1.
void set_num_threads(int n);

// Held while an op runs. Other threads that call ops wait; denormals are flushed, as in the pool's threads.
class OpScope {
public:
    OpScope();
    ~OpScope();
    OpScope(const OpScope&) = delete;
    OpScope& operator=(const OpScope&) = delete;

    // Names memory that a later op reads in the order of its units, so that waiting threads may fetch their parts of
    // it.
    void read_ahead(const void* data, int64_t num_bytes) noexcept;

    // Scratch memory, aligned to 64 bytes, with whatever was left in it. It is valid until the next call of this or the
    // end of the scope.
    void* workspace(size_t num_bytes);

private:
    uint64_t saved_fp_mode_;
};

}  // namespace octavo
