// What sampling needs beside SIMD: which token a row's weights and its noise give. Plain C++, the same for all kernels.
#pragma once

#include "ops.h"

namespace octavo {

// Weights that are added up together, so that a draw looks at one block of them only.
constexpr int64_t kSumBlock = 256;

int64_t num_sum_blocks(int64_t vocab_size) noexcept;

// A token of one row, drawn at the row's own noise among those that min_p, top_k and top_p leave. weights [vocab_size],
// the largest being 1; sums: of each block of kSumBlock weights.
int32_t draw(const SampleRow& row, const float* weights, const double* sums, int64_t vocab_size) noexcept;

}  // namespace octavo
