#include "step_inputs.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

void check_room(bool fits, const char* what, int64_t count, int64_t room) {
    if (!fits)
        throw std::out_of_range(std::string(what) + " " + std::to_string(count) + ", where there is room for " +
                                std::to_string(room));
}

}  // namespace

FilledStep fill_step(const BatchTables& tables, const StepArrays& arrays, const std::vector<ScheduledRequest>& requests) {
    FilledStep step = {0, 0};
    const int64_t block_size = tables.block_size, num_groups = static_cast<int64_t>(arrays.block_tables.size());
    const int64_t longest = std::min(tables.row_tokens - 1, num_groups ? tables.row_blocks * block_size : INT64_MAX);
    check_room(int64_t(requests.size()) <= arrays.num_requests, "requests:", int64_t(requests.size()),
               arrays.num_requests);
    arrays.query_start[0] = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
        const auto [row, first, count, num_logits] = requests[r];
        const int64_t end = first + count, num_blocks = (end + block_size - 1) / block_size;
        check_room(row >= 0 && row < tables.num_rows, "row", row, tables.num_rows);
        check_room(first >= 0 && count >= 0 && step.num_tokens + count <= arrays.num_tokens, "tokens:",
                   step.num_tokens + count, arrays.num_tokens);
        check_room(end <= longest, "a request of length", end, longest);
        check_room(num_logits >= 0 && num_logits <= std::max<int64_t>(count, 1) &&
                       step.num_logits + num_logits <= arrays.num_logits,
                   "rows of logits:", step.num_logits + num_logits, arrays.num_logits);
        const int32_t* token_ids = tables.token_ids + row * tables.row_tokens + first;
        std::copy(token_ids, token_ids + count, arrays.input_ids + step.num_tokens);
        for (int64_t i = 0; i < count; ++i) arrays.positions[step.num_tokens + i] = int32_t(first + i);
        for (int64_t group = 0; group < num_groups; ++group) {
            const int32_t* blocks = tables.block_tables + (row * num_groups + group) * tables.row_blocks;
            int32_t* slots = arrays.slot_mappings[group] + step.num_tokens;
            for (int64_t i = 0; i < count; ++i)
                slots[i] = int32_t(blocks[(first + i) / block_size] * block_size + (first + i) % block_size);
            std::copy(blocks, blocks + num_blocks, arrays.block_tables[group] + int64_t(r) * tables.row_blocks);
        }
        step.num_tokens += count;
        arrays.seq_lens[r] = int32_t(end);
        arrays.query_start[r + 1] = int32_t(step.num_tokens);
        for (int64_t left = num_logits; left > 0; --left) {  // a fork's one row is of the token before
            arrays.logits_rows[step.num_logits] = int32_t(step.num_tokens - left);
            arrays.draws[step.num_logits++].position = uint32_t(end - left + 1);
        }
    }
    return step;
}

int64_t accept_draws(const BatchTables& tables, const StepArrays& arrays, const ScheduledRequest& request, int64_t first) {
    int32_t* token_ids = tables.token_ids + request.row * tables.row_tokens;
    for (int64_t j = 0;; ++j) {
        const SampleRow& draw = arrays.draws[first + j];
        int32_t& place = token_ids[draw.position];
        const bool is_last =
            j + 1 == request.num_logits || draw.status != SampleStatus::good || place != draw.token_id;
        place = draw.token_id;
        if (is_last) return j + 1;
    }
}

}  // namespace octavo
