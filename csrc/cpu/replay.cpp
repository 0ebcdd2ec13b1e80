#include "replay.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

thread_local Recording* recording = nullptr;

void check_indices(const char* name, const int32_t* values, int64_t count, int64_t limit) {
    bool bad = false;
    for (int64_t i = 0; i < count; ++i) bad |= values[i] < 0 || values[i] >= limit;
    if (!bad) return;
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= limit)
            throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "] is " +
                                    std::to_string(values[i]) + ", outside [0, " + std::to_string(limit) + ")");
}

void check(const IndexCheck& c) { check_indices(c.name, c.values, c.num_rows, c.limit); }

void check(const StartsCheck& c) {
    bool bad = c.starts[0] != 0 || c.starts[c.num_requests] != c.num_rows;
    for (int64_t r = 0; r < c.num_requests; ++r) bad |= c.starts[r] > c.starts[r + 1];
    if (bad) throw std::out_of_range(std::string(c.name) + " must run from 0 to the number of tokens");
}

void check(const AttentionCheck& c) {
    if (c.query_start[0] != 0 || c.query_start[c.num_requests] != c.num_rows)
        throw std::out_of_range("query_start must run from 0 to the number of tokens");
    for (int64_t r = 0; r < c.num_requests; ++r) {
        const int64_t num_queries = c.query_start[r + 1] - c.query_start[r], seq_len = c.seq_lens[r];
        if (num_queries < 0 || num_queries > seq_len || seq_len > c.max_blocks * c.block_size)
            throw std::out_of_range("request " + std::to_string(r) + " has " + std::to_string(num_queries) +
                                    " queries, seq_len " + std::to_string(seq_len) + " and a block table for " +
                                    std::to_string(c.max_blocks * c.block_size) + " tokens");
        if (num_queries == 0) continue;
        const int64_t first_position = seq_len - num_queries;
        const int64_t first_seen = c.window > 0 && first_position >= c.window ? first_position - c.window + 1 : 0;
        const int64_t first_block = first_seen / c.block_size;
        check_indices("block_table", c.block_table + r * c.max_blocks + first_block,
                      (seq_len - 1) / c.block_size - first_block + 1, c.num_blocks);
    }
}

}  // namespace

void require(const Check& any) {
    if (recording) return recording->add(any);
    std::visit([](const auto& c) { check(c); }, any);
}

void Recording::begin() {
    if (recording) throw std::logic_error("this thread is recording already");
    recording = this;
}

void Recording::end() { recording = nullptr; }

Recording* Recording::current() { return recording; }

void RequireMultiples::require(int64_t count, int64_t most) {
    if (count % most)
        throw std::logic_error("an op for " + std::to_string(count) + " rows or requests can't be recorded in a step of " +
                               std::to_string(most));
}

void Recording::add(const Check& any) {
    std::visit([this](const auto& c) { require_multiples(c); }, any);
    if (std::find(checks_.begin(), checks_.end(), any) == checks_.end()) checks_.push_back(any);
}

void Recording::check(StepSize size) const {
    if (size.num_rows < 0 || size.num_rows > most_.num_rows || size.num_requests < 0 ||
        size.num_requests > most_.num_requests)
        throw std::out_of_range("a step of " + std::to_string(size.num_rows) + " rows and " +
                                std::to_string(size.num_requests) + " requests was recorded for " +
                                std::to_string(most_.num_rows) + " and " + std::to_string(most_.num_requests));
    for (const Check& any : checks_) std::visit([&](const auto& c) { octavo::check(resized(c, size)); }, any);
}

void Recording::replay(const std::vector<Run>& runs) {
    for (const Run& run : runs) run.recording->check(run.size);
    std::vector<Matrix> matrices;  // in the order in which they are read
    for (const Run& run : runs)
        for (const Entry& entry : run.recording->ops_)
            if (entry.matrix.data) matrices.push_back(entry.matrix);
    matrices.push_back({nullptr, 0});
    OpScope scope;
    auto next = matrices.begin();
    scope.read_ahead(next->data, next->num_bytes);
    for (const Run& run : runs)
        for (const Entry& entry : run.recording->ops_) {
            if (entry.matrix.data) {
                ++next;
                scope.read_ahead(next->data, next->num_bytes);
            }
            entry.op(scope, *run.recording, run.size);
        }
}

Recording::Matrix matrix_of(const LinearArgs& a) {
    return {a.packed, packed_size(a.num_rows, a.num_cols, a.weight_dtype) * (a.weight_dtype == DType::f32 ? 4 : 2)};
}
Recording::Matrix matrix_of(const LinearQuantizedArgs& a) {
    return {a.packed, packed_quantized_bytes(a.num_rows, a.num_cols, a.form)};
}

}  // namespace octavo
