// octavo_check: runs every op on random inputs with each instruction set that this CPU has, and compares what it writes
// with the scalar twin, bit for bit. Prints a digest for each case, so that runs on different machines can be compared;
// exits with 1 where instruction sets differ. Needs no Python, so that it runs under an emulator.
//
// Left out is fma_loop, which is a ceiling and not an op: how many chains it adds up follows the register tile.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "isa.h"
#include "ops.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr std::array kDTypes = {DType::f32, DType::bf16, DType::f16};

const char* name_of(DType dtype) { return std::array{"f32", "bf16", "f16", "int8", "f8"}[static_cast<size_t>(dtype)]; }
int64_t item_bytes(DType dtype) { return std::array{4, 2, 2, 1, 1}[static_cast<size_t>(dtype)]; }

// Zeros, aligned as the ops ask for.
class Buffer {
public:
    explicit Buffer(int64_t num_bytes)
        : num_bytes_(num_bytes), data_(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64), &std::free) {
        std::memset(data_.get(), 0, num_bytes);
    }
    int64_t num_bytes() const { return num_bytes_; }
    template <class T = void>
    T* as() const {
        return static_cast<T*>(data_.get());
    }

private:
    int64_t num_bytes_;
    std::unique_ptr<void, void (*)(void*)> data_;
};

// SplitMix64 (Steele et al., 2014).
class Random {
public:
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t limit) { return static_cast<uint32_t>(next() >> 32) % limit; }

    // Numbers of any sign and of magnitudes up to 4, small as often as large, one in sixteen subnormal.
    Buffer numbers(int64_t count, DType dtype = DType::f32) {
        Buffer out(count * item_bytes(dtype));
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = static_cast<uint32_t>(next()), kind = below(16);
            if (dtype == DType::f16) {
                out.as<uint16_t>()[i] = uint16_t((bits & 0x83ff) | (kind ? 4 + below(13) : 0) << 10);
                continue;
            }
            const uint32_t wide = (bits & 0x807fffff) | (kind ? 117 + below(12) : 0) << 23;
            if (dtype == DType::f32) out.as<uint32_t>()[i] = wide;
            else out.as<uint16_t>()[i] = uint16_t(wide >> 16);
        }
        return out;
    }
    Buffer bytes(int64_t count, uint32_t limit) {
        Buffer out(count);
        for (int64_t i = 0; i < count; ++i) out.as<uint8_t>()[i] = uint8_t(below(limit));
        return out;
    }
    std::vector<int32_t> indices(int64_t count, uint32_t limit) {
        std::vector<int32_t> out(count);
        for (int32_t& index : out) index = static_cast<int32_t>(below(limit));
        return out;
    }

private:
    uint64_t state_ = 0;
};

// What a case wrote, one output after the other.
using Output = std::vector<uint8_t>;

void append(Output& out, const Buffer& buffer) {
    out.insert(out.end(), buffer.as<uint8_t>(), buffer.as<uint8_t>() + buffer.num_bytes());
}

// FNV-1a.
uint64_t digest(const Output& out) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint8_t byte : out) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
}

int num_cases = 0, num_different = 0;

// fn(Random&, Output&) runs ops and appends what they wrote; it is called anew for each instruction set.
template <class Fn>
void compare(const std::string& name, const Fn& fn) {
    const auto run = [&](const std::string& isa) {
        set_isa(isa);
        Random random;
        Output out;
        fn(random, out);
        return out;
    };
    const Output expected = run("scalar");
    std::string different;
    for (const std::string& isa : supported_isas())
        if (isa != "scalar" && run(isa) != expected) different += " " + isa;
    ++num_cases;
    num_different += !different.empty();
    std::printf("%016llx  %s, %zu bytes%s\n", static_cast<unsigned long long>(digest(expected)), name.c_str(),
                expected.size(), different.empty() ? "" : (" DIFFERENT ON" + different).c_str());
}

struct Shape {
    int64_t num_tokens, num_rows, num_cols;
};
constexpr std::array kShapes = {Shape{1, 37, 45}, Shape{2, 80, 64}, Shape{7, 50, 33}, Shape{17, 133, 160}};

std::string text(const Shape& s) {
    return std::to_string(s.num_tokens) + "x" + std::to_string(s.num_rows) + "x" + std::to_string(s.num_cols);
}

void check_linear(const Shape& s, DType x_dtype, DType weight_dtype, DType out_dtype) {
    const std::string x = name_of(x_dtype), weight = name_of(weight_dtype), y = name_of(out_dtype);
    compare("linear, embedding " + x + " * " + weight + " -> " + y + " " + text(s), [&](Random& random, Output& out) {
        const Buffer x = random.numbers(s.num_tokens * s.num_cols, x_dtype);
        const Buffer weight = random.numbers(s.num_rows * s.num_cols, weight_dtype);
        const Buffer bias = random.numbers(s.num_rows);
        const std::vector<int32_t> token_ids = random.indices(s.num_tokens, uint32_t(s.num_rows));
        const Buffer packed(packed_size(s.num_rows, s.num_cols, weight_dtype) * item_bytes(weight_dtype));
        pack({weight.as(), packed.as(), s.num_rows, s.num_cols, weight_dtype});
        append(out, packed);
        const Buffer rows(s.num_tokens * s.num_cols * 4);
        embedding(
            {token_ids.data(), packed.as(), rows.as<float>(), s.num_tokens, s.num_rows, s.num_cols, weight_dtype});
        append(out, rows);
        for (const float* b : {static_cast<const float*>(nullptr), static_cast<const float*>(bias.as<float>())}) {
            const Buffer y(s.num_tokens * s.num_rows * item_bytes(out_dtype));
            linear({x.as(), packed.as(), b, y.as(), nullptr, s.num_tokens, s.num_rows, s.num_cols, x_dtype,
                    weight_dtype, out_dtype});
            append(out, y);
        }
    });
}

// Every bit pattern to float32.
void check_widening(DType dtype) {
    compare(std::string("embedding of all ") + name_of(dtype), [&](Random&, Output& out) {
        const int64_t num_rows = 4096, num_cols = 16;
        const Buffer weight(num_rows * num_cols * 2), packed(packed_size(num_rows, num_cols, dtype) * 2);
        const Buffer rows(num_rows * num_cols * 4);
        std::vector<int32_t> token_ids;
        for (int64_t i = 0; i < num_rows * num_cols; ++i) weight.as<uint16_t>()[i] = uint16_t(i);
        for (int32_t i = 0; i < num_rows; ++i) token_ids.push_back(i);
        pack({weight.as(), packed.as(), num_rows, num_cols, dtype});
        embedding({token_ids.data(), packed.as(), rows.as<float>(), num_rows, num_rows, num_cols, dtype});
        append(out, rows);
    });
}

// All kinds of float32, those half-way between two narrow numbers often, times 1.
void check_narrowing(DType dtype) {
    compare(std::string("linear by 1 to ") + name_of(dtype), [&](Random& random, Output& out) {
        const int64_t num_tokens = 20000;
        const Buffer x(num_tokens * 4), packed(kLanes * 4), y(num_tokens * item_bytes(dtype));
        for (int64_t i = 0; i < num_tokens; ++i) {
            const uint32_t bits = static_cast<uint32_t>(random.next()), kind = random.below(4);
            const uint32_t near = (bits & 0x807fffff) | (100 + random.below(45)) << 23;  // what f16 tells apart
            const uint32_t numbers[] = {bits, near, (bits & ~0xffffu) | 0x8000, (near & ~0x1fffu) | 0x1000};
            x.as<uint32_t>()[i] = numbers[kind];
        }
        const float one = 1.0f;
        pack({&one, packed.as(), 1, 1, DType::f32});
        linear({x.as(), packed.as(), nullptr, y.as(), nullptr, num_tokens, 1, 1, DType::f32, DType::f32, dtype});
        append(out, y);
    });
}

void check_quantized(const Shape& s, const QuantizedForm& form, DType x_dtype) {
    const std::string name = "quantised linear, embedding " + std::to_string(form.bits) + " bits, group " +
                             std::to_string(form.group) + (form.has_mins ? ", minima" : "") +
                             (form.wide_scales ? ", wide" : "") + " " + name_of(x_dtype) + " " + text(s);
    compare(name, [&](Random& random, Output& out) {
        const DType scale_dtype = form.wide_scales ? DType::f32 : DType::f16;
        const int64_t num_scales = s.num_rows * ((s.num_cols + form.group - 1) / form.group);
        const Buffer values = random.bytes(s.num_rows * s.num_cols, 1u << form.bits);
        const Buffer scales = random.numbers(num_scales, scale_dtype), mins = random.numbers(num_scales, scale_dtype);
        const Buffer x = random.numbers(s.num_tokens * s.num_cols, x_dtype);
        const std::vector<int32_t> token_ids = random.indices(s.num_tokens, uint32_t(s.num_rows));
        const Buffer packed(packed_quantized_bytes(s.num_rows, s.num_cols, form));
        pack_quantized({values.as<uint8_t>(), scales.as(), form.has_mins ? mins.as() : nullptr, packed.as(), s.num_rows,
                        s.num_cols, form});
        append(out, packed);
        const Buffer rows(s.num_tokens * s.num_cols * 4);
        embedding_quantized(
            {token_ids.data(), packed.as(), rows.as<float>(), s.num_tokens, s.num_rows, s.num_cols, form});
        append(out, rows);
        for (const bool int8_activations : {true, false}) {
            const Buffer y(s.num_tokens * s.num_rows * 4);
            LinearQuantizedArgs args = {};
            args.x = x.as();
            args.packed = packed.as();
            args.out = y.as();
            args.num_tokens = s.num_tokens;
            args.num_rows = s.num_rows;
            args.num_cols = s.num_cols;
            args.x_dtype = x_dtype;
            args.out_dtype = DType::f32;
            args.form = form;
            args.int8_activations = int8_activations;
            linear_quantized(args);
            append(out, y);
        }
    });
}

void check_norms(int64_t num_tokens, int64_t size, DType x_dtype, DType out_dtype) {
    const std::string name = std::string(name_of(x_dtype)) + " -> " + name_of(out_dtype) + " " +
                             std::to_string(num_tokens) + "x" + std::to_string(size);
    compare("norms " + name, [&](Random& random, Output& out) {
        const Buffer x = random.numbers(num_tokens * size, x_dtype), sum = random.numbers(num_tokens * size);
        const Buffer weight = random.numbers(size), bias = random.numbers(size);
        const Buffer y(num_tokens * size * item_bytes(out_dtype));
        rms_norm({sum.as(), nullptr, weight.as<float>(), y.as(), num_tokens, size, 1e-5f, DType::f32, out_dtype});
        append(out, y);
        rms_norm({x.as(), sum.as<float>(), weight.as<float>(), y.as(), num_tokens, size, 1e-5f, x_dtype, out_dtype});
        append(out, y);
        append(out, sum);
        add_layer_norm({x.as(), sum.as<float>(), weight.as<float>(), bias.as<float>(), y.as(), num_tokens, size, 1e-5f,
                        x_dtype, out_dtype});
        append(out, y);
        append(out, sum);
    });
}

void check_elementwise(int64_t num_rows, int64_t size, DType dtype) {
    const std::string name = std::string(name_of(dtype)) + " " + std::to_string(num_rows) + "x" + std::to_string(size);
    compare("activations, means, l2_normalize, scale, gather_rows " + name, [&](Random& random, Output& out) {
        const Buffer x = random.numbers(num_rows * 2 * size, dtype), wide = random.numbers(num_rows * size);
        const Buffer y(num_rows * size * item_bytes(dtype)), floats(num_rows * size * 4);
        gelu({x.as(), y.as(), num_rows * size, dtype});
        append(out, y);
        silu_mul({x.as(), y.as(), num_rows, size, dtype});
        append(out, y);
        gelu_tanh_mul({x.as(), y.as(), num_rows, size, dtype});
        append(out, y);
        const std::vector<int32_t> row_start = {0, int32_t(num_rows / 3), int32_t(num_rows)};
        mean_rows({x.as(), row_start.data(), floats.as<float>(), num_rows, 2, size, dtype});
        append(out, floats);
        l2_normalize({x.as(), floats.as<float>(), num_rows, size, dtype});
        append(out, floats);
        scale({wide.as<float>(), floats.as<float>(), num_rows * size, 0.0625f});
        append(out, floats);
        const std::vector<int32_t> indices = random.indices(num_rows, uint32_t(2 * num_rows));
        gather_rows({x.as(), indices.data(), y.as(), 2 * num_rows, num_rows, size, item_bytes(dtype)});
        append(out, y);
    });
}

// Writes three requests of different lengths to a cache, then attends: one decoding, over two partitions; one amid its
// prompt; one at its whole prompt.
void check_attention(DType dtype, DType cache_dtype, int64_t head_dim, int64_t block_size, int64_t window) {
    const std::string name = std::string(name_of(dtype)) + ", cache " + name_of(cache_dtype) + ", heads of " +
                             std::to_string(head_dim) + ", blocks of " + std::to_string(block_size) + ", window " +
                             std::to_string(window);
    compare("rope_write_kv, paged_attention " + name, [&](Random& random, Output& out) {
        constexpr int64_t kNumHeads = 6, kNumKVHeads = 2;
        const std::vector<int32_t> seq_lens = {531, 45, 21}, query_start = {0, 1, 10, 31};
        const int64_t num_requests = 3, num_queries = 31, num_tokens = 531 + 45 + 21;
        const int64_t max_blocks = (531 + block_size - 1) / block_size, num_blocks = num_requests * max_blocks;
        std::vector<int32_t> block_table(num_blocks), positions, slots;
        for (int64_t i = 0; i < num_blocks; ++i) {  // shuffled
            const uint32_t j = random.below(uint32_t(i + 1));
            block_table[i] = block_table[j];
            block_table[j] = int32_t(i);
        }
        for (int64_t r = 0; r < num_requests; ++r)
            for (int32_t p = 0; p < seq_lens[r]; ++p) {
                positions.push_back(p);
                const int64_t block = block_table[r * max_blocks + p / block_size];
                slots.push_back(int32_t(block * block_size + p % block_size));
            }
        const Buffer qkv = random.numbers(num_tokens * (kNumHeads + 2 * kNumKVHeads) * head_dim, dtype);
        const Buffer cos_sin = random.numbers(531 * head_dim), norm = random.numbers(head_dim);
        const int64_t tile_bytes = 16 * (head_dim * item_bytes(cache_dtype) + (item_bytes(cache_dtype) == 1 ? 4 : 0));
        const Buffer cache_bytes(num_blocks * kNumKVHeads * 2 * block_size / 16 * tile_bytes);
        const KVCache cache = {cache_bytes.as(), num_blocks, kNumKVHeads, block_size, head_dim, cache_dtype};
        const Buffer q(num_tokens * kNumHeads * head_dim * item_bytes(dtype));
        const Buffer y(num_queries * kNumHeads * head_dim * item_bytes(dtype));
        for (const float* weight : {static_cast<const float*>(nullptr), static_cast<const float*>(norm.as<float>())}) {
            rope_write_kv({qkv.as(), positions.data(), cos_sin.as<float>(), slots.data(), weight, weight, 1e-6f, q.as(),
                           cache, num_tokens, kNumHeads, 531, dtype});
            append(out, q);
            append(out, cache_bytes);
            AttentionArgs args = {};
            args.q = q.as();
            args.cache = cache;
            args.block_table = block_table.data();
            args.query_start = query_start.data();
            args.seq_lens = seq_lens.data();
            args.out = y.as();
            args.num_tokens = num_queries;
            args.num_requests = num_requests;
            args.max_blocks = max_blocks;
            args.num_heads = kNumHeads;
            args.scale = 0.125f;
            args.window = window;
            args.dtype = dtype;
            paged_attention(args);
            append(out, y);
        }
    });
}

void check_encoder_attention(DType dtype, int64_t head_dim) {
    const std::string name = std::string(name_of(dtype)) + ", heads of " + std::to_string(head_dim);
    compare("write_kv, encoder_attention " + name, [&](Random& random, Output& out) {
        constexpr int64_t kNumHeads = 3, kNumTokens = 108;
        const std::vector<int32_t> query_start = {0, 5, 38, 108};
        const Buffer qkv = random.numbers(kNumTokens * 3 * kNumHeads * head_dim, dtype);
        const Buffer y(kNumTokens * kNumHeads * head_dim * item_bytes(dtype));
        encoder_attention({qkv.as(), query_start.data(), y.as(), kNumTokens, 3, kNumHeads, head_dim, 0.125f, dtype});
        append(out, y);
    });
}

void check_sampling(int64_t vocab_size) {
    compare("sample_rows of " + std::to_string(vocab_size) + " tokens", [&](Random& random, Output& out) {
        const int64_t mask_bytes = (vocab_size + 7) / 8;
        const Buffer mask = random.bytes(mask_bytes, 256), nothing(mask_bytes);
        std::vector<SampleRow> rows;
        std::vector<uint8_t> masks;
        const auto add = [&](float temperature, int32_t top_k, double top_p, double min_p, const Buffer* allowed) {
            const uint8_t* bits = (allowed ? *allowed : nothing).as<uint8_t>();
            masks.insert(masks.end(), bits, bits + mask_bytes);
            const uint32_t position = uint32_t(rows.size());
            const uint64_t seed = random.next();
            rows.push_back({seed, top_p, min_p, temperature, top_k, 0, position, -1, SampleStatus::good,
                            int32_t(allowed != nullptr), 0});
        };
        for (const Buffer* allowed : {static_cast<const Buffer*>(nullptr), &mask}) {
            add(0.0f, 0, 1.0, 0.0, allowed);
            add(0.7f, 0, 1.0, 0.0, allowed);
            add(1.0f, 20, 1.0, 0.0, allowed);
            add(1.3f, 0, 0.9, 0.0, allowed);
            add(1.0f, 0, 1.0, 0.05, allowed);
            add(0.3f, 40, 0.8, 0.02, allowed);
        }
        add(0.7f, 0, 1.0, 0.0, &nothing);
        add(0.7f, 0, 1.0, 0.0, nullptr);  // with a NaN
        const int64_t num_rows = int64_t(rows.size());
        const Buffer logits = random.numbers(num_rows * vocab_size);
        logits.as<uint32_t>()[num_rows * vocab_size - 2] = 0x7fc00000;
        sample_rows({logits.as<float>(), rows.data(), masks.data(), nullptr, num_rows, vocab_size});
        append(out, logits);
        const Buffer results(num_rows * 8);
        for (int64_t i = 0; i < num_rows; ++i) {
            results.as<int32_t>()[2 * i] = rows[i].token_id;
            results.as<int32_t>()[2 * i + 1] = int32_t(rows[i].status);
        }
        append(out, results);
    });
}

void check_read_loop() {
    compare("read_loop", [](Random& random, Output& out) {
        const Buffer data = random.numbers(3 * kReadBytes / 4), sums(2 * kLanes * 4);
        const ReadSpan spans[] = {{data.as<char>() + kReadBytes, 2 * kReadBytes}, {data.as(), kReadBytes}};
        OpScope scope;
        active_table().read_loop(spans, 2, sums.as<float>());
        append(out, sums);
    });
}

void check_all() {
    for (const DType dtype : {DType::bf16, DType::f16}) check_widening(dtype);
    for (const DType dtype : kDTypes) check_narrowing(dtype);
    for (const Shape& s : kShapes)
        for (const DType x_dtype : kDTypes)
            for (const DType weight_dtype : kDTypes) {
                check_linear(s, x_dtype, weight_dtype, DType::f32);
                if (x_dtype != DType::f32) check_linear(s, x_dtype, weight_dtype, x_dtype);
            }
    for (const Shape& s : kShapes)
        for (const int bits : {4, 8})
            for (const bool has_mins : {false, true})
                for (const DType x_dtype : kDTypes) {
                    const int zero = has_mins ? 0 : 1 << (bits - 1);
                    check_quantized(s, {bits, 16, zero, has_mins, true}, x_dtype);
                    check_quantized(s, {bits, 32, zero, has_mins, true}, x_dtype);
                    check_quantized(s, {bits, 32, zero, has_mins, false}, x_dtype);
                }
    for (const DType x_dtype : kDTypes)
        for (const DType out_dtype : kDTypes)
            for (const int64_t size : {45, 64, 257}) check_norms(5, size, x_dtype, out_dtype);
    for (const DType dtype : kDTypes)
        for (const int64_t size : {7, 45, 256}) check_elementwise(9, size, dtype);
    for (const DType dtype : kDTypes)
        for (const DType cache_dtype : {dtype, DType::int8, DType::f8}) {
            check_attention(dtype, cache_dtype, 64, 16, 0);
            check_attention(dtype, cache_dtype, 80, 32, 37);
        }
    for (const DType dtype : kDTypes)
        for (const int64_t head_dim : {32, 80}) check_encoder_attention(dtype, head_dim);
    for (const int64_t vocab_size : {1003, 5000}) check_sampling(vocab_size);
    check_read_loop();
}

}  // namespace
}  // namespace octavo

int main() {
    octavo::set_num_threads(2);
    std::string isas;
    for (const std::string& isa : octavo::supported_isas()) isas += " " + isa;
    std::printf("instruction sets:%s\n", isas.c_str());
    octavo::check_all();
    std::printf("%d of %d cases differ\n", octavo::num_different, octavo::num_cases);
    return octavo::num_different ? 1 : 0;
}
