#include "sampling.h"

#include <algorithm>
#include <vector>

namespace octavo {

namespace {

// Weights, the largest being 1, above which filters look for their tokens; the last takes all.
constexpr float kThresholds[] = {1e-3f, 1e-6f, -1.0f};

// Philox-4x32-10 (Salmon et al., 2011): 53 random bits of the counter (position, choice) and the key `seed`, in [0, 1).
double uniform(const SampleRow& row) {
    uint32_t c[4] = {row.position, row.choice, 0, 0};
    uint32_t key[2] = {uint32_t(row.seed), uint32_t(row.seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{c[0]} * 0xD2511F53u, product1 = uint64_t{c[2]} * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(product1 >> 32) ^ c[1] ^ key[0], uint32_t(product1),
                                  uint32_t(product0 >> 32) ^ c[3] ^ key[1], uint32_t(product0)};
        std::copy(next, next + 4, c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return double(uint64_t{c[0]} << 21 | c[1] >> 11) * 0x1p-53;
}

// The first index whose cumulative sum exceeds `noise` times the total; never one of weight 0.
int64_t invert(const std::vector<double>& cumulative, double noise) {
    const double total = cumulative.back();
    const auto first = cumulative.begin(), last = cumulative.end();
    return std::min(std::upper_bound(first, last, noise * total), std::lower_bound(first, last, total)) - first;
}

template <class T>
void accumulate(std::vector<double>& cumulative, const T* values, int64_t count) {
    cumulative.clear();
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) cumulative.push_back(sum += double(values[i]));
}

// Of the whole row: first the block, then the place in it.
int64_t draw_any(const float* weights, const double* sums, int64_t vocab_size, double noise,
                 std::vector<double>& cumulative) {
    accumulate(cumulative, sums, num_sum_blocks(vocab_size));
    const int64_t block = invert(cumulative, noise), first = block * kSumBlock;
    const double target = noise * cumulative.back() - (block ? cumulative[block - 1] : 0.0);
    accumulate(cumulative, weights + first, std::min(kSumBlock, vocab_size - first));
    return first + invert(cumulative, std::clamp(target / cumulative.back(), 0.0, 1.0));
}

struct Candidate {
    float weight;
    int32_t token_id;
};

void find_above(float threshold, const float* weights, const double* sums, int64_t vocab_size,
                std::vector<Candidate>& found) {
    found.clear();
    for (int64_t block = 0; block < num_sum_blocks(vocab_size); ++block) {
        if (sums[block] <= threshold) continue;  // no weight exceeds a sum that it is in
        const int64_t last = std::min((block + 1) * kSumBlock, vocab_size);
        for (int64_t i = block * kSumBlock; i < last; ++i)
            if (weights[i] > threshold) found.push_back({weights[i], int32_t(i)});
    }
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.token_id < b.token_id;
    });
}

}  // namespace

int64_t num_sum_blocks(int64_t vocab_size) noexcept { return (vocab_size + kSumBlock - 1) / kSumBlock; }

int32_t draw(const SampleRow& row, const float* weights, const double* sums, int64_t vocab_size) noexcept {
    static thread_local std::vector<Candidate> found;  // kept for their capacity
    static thread_local std::vector<double> cumulative;
    const double noise = uniform(row);
    if (row.top_k <= 0 && row.top_p == 1.0 && row.min_p == 0.0)
        return int32_t(draw_any(weights, sums, vocab_size, noise, cumulative));
    for (const float threshold : kThresholds) {
        find_above(threshold, weights, sums, vocab_size, found);
        const int64_t num_found = int64_t(found.size());
        int64_t num_kept = 0;
        double total = 0.0;
        cumulative.clear();
        while (num_kept < num_found && found[num_kept].weight >= row.min_p && (row.top_k <= 0 || num_kept < row.top_k))
            cumulative.push_back(total += found[num_kept++].weight);
        // Whether every token that min_p and top_k leave is at hand, so that `total` is theirs.
        const bool is_whole = threshold < 0 || row.min_p > threshold || (row.top_k > 0 && row.top_k <= num_found);
        if (!is_whole) {
            if (row.top_k > 0 || row.min_p > 0) continue;
            const double kept = total;
            total = 0.0;
            for (int64_t block = 0; block < num_sum_blocks(vocab_size); ++block) total += sums[block];
            if (kept < row.top_p * total) continue;
        }
        const auto edge = std::lower_bound(cumulative.begin(), cumulative.end(), row.top_p * total);
        cumulative.resize(std::min<int64_t>(edge - cumulative.begin() + 1, num_kept));
        return found[invert(cumulative, noise)].token_id;
    }
    return -1;  // not reached: the last threshold takes every token
}

}  // namespace octavo
