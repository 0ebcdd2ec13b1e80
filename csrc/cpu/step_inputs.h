// A step's inputs from a batch's rows, and what was drawn into them: the native twin of ReferenceFiller
// (octavo/devices/reference/filler.py). Plain C++ on the calling thread.
#pragma once

#include <stdint.h>

#include <vector>

#include "ops.h"

namespace octavo {

// As BatchTables and StepArrays of octavo/devices/host_buffers.py.
struct BatchTables {
    int32_t* token_ids;           // [num_rows, row_tokens]
    const int32_t* block_tables;  // [num_rows, num_groups, row_blocks]
    int64_t num_rows, row_tokens, row_blocks, block_size;
};

struct StepArrays {
    int32_t *input_ids, *positions, *query_start, *seq_lens, *logits_rows;
    std::vector<int32_t*> slot_mappings, block_tables;  // one a group
    SampleRow* draws;
    int64_t num_tokens, num_requests, num_logits;  // room for so many
};

struct ScheduledRequest {
    int64_t row, first_position, num_tokens, num_logits;
};

struct FilledStep {
    int64_t num_tokens, num_logits;
};

// Throws std::out_of_range for what there is no room for.
FilledStep fill_step(const BatchTables& tables, const StepArrays& arrays, const std::vector<ScheduledRequest>& requests);

// Of a request's draws, from `first` on: how many are accepted, up to the first that differs from the draft after it. Puts
// their tokens at their places in the table.
int64_t accept_draws(const BatchTables& tables, const StepArrays& arrays, const ScheduledRequest& request, int64_t first);

}  // namespace octavo
