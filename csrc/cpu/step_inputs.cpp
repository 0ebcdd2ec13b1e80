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
    FilledStep step = {0, 0, 0};
    const int64_t block_size = tables.block_size, num_groups = static_cast<int64_t>(arrays.block_tables.size());
    const int64_t row_blocks = std::min(tables.row_blocks, arrays.row_blocks);
    check_room(int64_t(requests.size()) <= arrays.num_requests, "requests:", int64_t(requests.size()),
               arrays.num_requests);
    arrays.query_start[0] = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
        const auto [row, first, count, samples] = requests[r];
        const int64_t end = first + count, num_blocks = (end + block_size - 1) / block_size;
        check_room(row >= 0 && row < tables.num_rows, "row", row, tables.num_rows);
        check_room(first >= 0 && count >= 0 && step.num_tokens + count <= arrays.num_tokens, "tokens:",
                   step.num_tokens + count, arrays.num_tokens);
        check_room(end < tables.row_tokens && num_blocks <= row_blocks, "a request of length", end,
                   std::min(tables.row_tokens - 1, row_blocks * block_size));
        const int32_t* token_ids = tables.token_ids + row * tables.row_tokens + first;
        std::copy(token_ids, token_ids + count, arrays.input_ids + step.num_tokens);
        for (int64_t i = 0; i < count; ++i) arrays.positions[step.num_tokens + i] = int32_t(first + i);
        for (int64_t group = 0; group < num_groups; ++group) {
            const int32_t* blocks = tables.block_tables + (row * num_groups + group) * tables.row_blocks;
            int32_t* slots = arrays.slot_mappings[group] + step.num_tokens;
            for (int64_t i = 0; i < count; ++i)
                slots[i] = int32_t(blocks[(first + i) / block_size] * block_size + (first + i) % block_size);
            std::copy(blocks, blocks + num_blocks, arrays.block_tables[group] + int64_t(r) * arrays.row_blocks);
        }
        step.num_tokens += count;
        step.num_blocks = std::max(step.num_blocks, num_blocks);
        arrays.rows[r] = int32_t(row);
        arrays.seq_lens[r] = int32_t(end);
        arrays.query_start[r + 1] = int32_t(step.num_tokens);
        if (!samples) continue;
        arrays.logits_rows[step.num_sampled] = int32_t(step.num_tokens - 1);
        arrays.sampled_rows[step.num_sampled] = int32_t(row);
        arrays.draws[step.num_sampled].position = uint32_t(end);
        ++step.num_sampled;
    }
    return step;
}

bool append_tokens(const BatchTables& tables, const StepArrays& arrays, int64_t num_sampled) {
    bool are_good = true;
    for (int64_t s = 0; s < num_sampled; ++s) {
        const SampleRow& draw = arrays.draws[s];
        tables.token_ids[arrays.sampled_rows[s] * tables.row_tokens + draw.position] = draw.token_id;
        are_good &= draw.status == SampleStatus::good;
    }
    return are_good;
}

}  // namespace octavo
