// The persistent pool that every op runs on, and the state that one op at a time owns: pool, FP mode, scratch memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

// Calls fn(context, unit) for each unit in [0, num_units), on any thread, in any order; returns when all are done.
// Only inside an OpScope, and never from within fn.
void parallel_for(int64_t num_units, void (*fn)(const void* context, int64_t unit) noexcept,
                  const void* context) noexcept;

int num_threads();

// A number that changes whenever a thread claims units, readable from any thread at any time.
uint64_t progress();

// Starts or ends pool threads, so that n threads (the caller included; 1 at first) share the units. Throws on n < 1.
void set_num_threads(int n);

// Held while an op runs: other threads wait, denormals are flushed as in the pool's threads.
class OpScope {
public:
    OpScope();
    ~OpScope();
    OpScope(const OpScope&) = delete;
    OpScope& operator=(const OpScope&) = delete;

    // Names memory that a later op reads in order of its units: threads that wait may fetch their parts of it.
    void read_ahead(const void* data, int64_t num_bytes) noexcept;

    // 64-byte aligned scratch memory, valid until the next call or the end of the scope; contents are left over.
    void* workspace(size_t num_bytes);

private:
    uint64_t saved_fp_mode_;
};

}  // namespace octavo
