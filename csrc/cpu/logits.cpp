// Rows of logits before a token is drawn: whether they are finite, the grammar's mask, the most likely token, and the
// weights e^((x - max) / temperature).
#include "logit_keys.h"
#include "sampling.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

constexpr int64_t kChunk = 1024;  // stays in the first cache between the passes over it

// The greatest key of n values. `nan` becomes nonzero if one of them is no number.
OCTAVO_INLINE int32_t greatest_key(const int32_t* bits, int64_t n, int32_t& nan) {
    int32_t greatest = kLowest, found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t key = key_of(bits[i]);
        greatest = key > greatest ? key : greatest;
        found |= is_nan(bits[i]);
    }
    nan |= found;
    return greatest;
}

// Eight bits of a mask as eight words, all ones where the token is allowed.
struct WordsOfByte {
    int32_t words[256][8];
    constexpr WordsOfByte() : words() {
        for (int byte = 0; byte < 256; ++byte)
            for (int bit = 0; bit < 8; ++bit) words[byte][bit] = byte >> bit & 1 ? -1 : 0;
    }
};
constexpr WordsOfByte kWordsOfByte;

// Makes what the mask does not allow -inf. `mask` begins at the first of the n values, at a byte's first bit.
OCTAVO_INLINE void forbid(int32_t* bits, int64_t n, const uint8_t* mask) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const int32_t* allowed = kWordsOfByte.words[mask[i / 8]];
        for (int j = 0; j < 8; ++j) bits[i + j] = (bits[i + j] & allowed[j]) | (kNegativeInfinity & ~allowed[j]);
    }
    for (; i < n; ++i)
        if (!(mask[i / 8] >> i % 8 & 1)) bits[i] = kNegativeInfinity;
}

// Whether the mask allows any of n tokens, n rounded up to whole bytes.
OCTAVO_INLINE bool allows_any(const uint8_t* mask, int64_t n) {
    uint8_t any = 0;
    for (int64_t i = 0; i < (n + 7) / 8; ++i) any |= mask[i];
    return any != 0;
}

// The first of the most likely tokens that are allowed, and its logit.
void choose(SampleRow& row, int32_t* bits, int64_t vocab_size, const uint8_t* mask) {
    int32_t nan = 0, greatest = kLowest, best = kLowest;
    int64_t best_chunk = 0;
    for (int64_t first = 0; first < vocab_size; first += kChunk) {
        const int64_t n = vocab_size - first < kChunk ? vocab_size - first : kChunk;
        int32_t key = greatest_key(bits + first, n, nan);
        greatest = key > greatest ? key : greatest;
        if (mask && !allows_any(mask + first / 8, n)) {
            for (int64_t i = first; i < first + n; ++i) bits[i] = kNegativeInfinity;
            key = key_of(kNegativeInfinity);
        } else if (mask) {
            forbid(bits + first, n, mask + first / 8);
            int32_t ignored = 0;
            key = greatest_key(bits + first, n, ignored);
        }
        if (key > best) {
            best = key;
            best_chunk = first;
        }
    }
    row.token_id = int32_t(best_chunk);
    while (row.token_id < vocab_size - 1 && key_of(bits[row.token_id]) != best) ++row.token_id;
    const int32_t lowest = key_of(kNegativeInfinity);
    row.status = nan || greatest >= kInfinity || greatest <= lowest ? SampleStatus::not_finite
                 : best <= lowest                                   ? SampleStatus::nothing_left
                                                                    : SampleStatus::good;
}

// Logits to weights, in place, and the sum of each block of them.
void weigh(const SampleRow& row, float* logits, double* sums, int64_t vocab_size, const uint8_t* mask) {
    const Vec largest = set1(logits[row.token_id]), temperature = set1(row.temperature);
    for (int64_t first = 0; first < vocab_size; first += kSumBlock) {
        const int64_t last = first + kSumBlock < vocab_size ? first + kSumBlock : vocab_size;
        Vec sum = set1(0.0f);
        if (mask && !allows_any(mask + first / 8, last - first)) {  // no need to take the powers
            for (int64_t i = first; i < last; ++i) logits[i] = 0.0f;
            sums[first / kSumBlock] = 0.0;
            continue;
        }
        for (int64_t i = first; i < last; i += kLanes) {
            store(logits + i, exp(div(sub(load(logits + i, last - i), largest), temperature)), last - i);
            sum = add(sum, load(logits + i, last - i));
        }
        sums[first / kSumBlock] = double(reduce_add(sum));
    }
}

}  // namespace

void sample_rows(const SampleArgs& a) noexcept {
    const int64_t num_blocks = num_sum_blocks(a.vocab_size);
    parallel(a.num_rows, [&](int64_t i) {
        SampleRow& row = a.rows[i];
        float* logits = a.logits + i * a.vocab_size;
        const uint8_t* mask = row.is_masked ? a.masks + i * ((a.vocab_size + 7) / 8) : nullptr;
        choose(row, reinterpret_cast<int32_t*>(logits), a.vocab_size, mask);
        if (row.status != SampleStatus::good || row.temperature == 0.0f) return;
        weigh(row, logits, a.sums + i * num_blocks, a.vocab_size, mask);
        row.token_id = draw(row, logits, a.sums + i * num_blocks, a.vocab_size);
    });
}

}  // namespace octavo::OCTAVO_ISA
