// A step's inputs from a batch's rows: StepFiller of octavo/kernels/step_inputs.py. Plain C++ on the calling thread.
#pragma once

#include <stdint.h>

#include <vector>

#include "ops.h"

namespace octavo {

// As BatchTables and StepArrays there.
struct BatchTables {
    int32_t* token_ids;           // [num_rows, row_tokens]
    const int32_t* block_tables;  // [num_rows, num_groups, row_blocks]
    int64_t num_rows, row_tokens, row_blocks, block_size;
};

struct StepArrays {
    int32_t *input_ids, *positions, *query_start, *seq_lens, *rows, *logits_rows, *sampled_rows;
    std::vector<int32_t*> slot_mappings, block_tables;  // one a group
    SampleRow* draws;
    int64_t num_tokens, num_requests, row_blocks;       // room for so many
};

struct FilledStep {
    int64_t num_tokens, num_sampled, num_blocks;
};

struct ScheduledRequest {
    int64_t row, num_computed_tokens, num_scheduled_tokens;
    bool samples;
};

// Throws std::out_of_range for what there is no room for.
FilledStep fill_step(const BatchTables& tables, const StepArrays& arrays, const std::vector<ScheduledRequest>& requests);

// Puts the first num_sampled draws' tokens at their places in the table. Returns whether all draws are good.
bool append_tokens(const BatchTables& tables, const StepArrays& arrays, int64_t num_sampled);

}  // namespace octavo
