// Rotary embedding of queries and keys, after a norm of each head where there is one, and the write of keys and values to the cache, rotated or as they are.
#include "simd.h"

namespace octavo::OCTAVO_ISA {

namespace {

// dims [d, d + 16) and [d + head_dim / 2, …) of a head, rotated.
struct Rotated {
    Vec first, second;
};

// The RMS norm of one head: sixteen partial sums and the tree, as in rms_norm. Without a weight it changes nothing.
struct HeadNorm {
    const float* weight;
    Vec scale;
};

template <class T>
OCTAVO_INLINE HeadNorm head_norm(const float* weight, float eps, const T* head, int64_t dim) {
    if (!weight) return {nullptr, set1(1.0f)};
    Vec squares = set1(0.0f);
    for (int64_t d = 0; d < dim; d += kLanes) {
        const Vec value = load(head + d);
        squares = fma(value, value, squares);
    }
    return {weight, set1(1.0f / __builtin_sqrtf(reduce_add(squares) / float(dim) + eps))};
}

template <class T>
OCTAVO_INLINE Vec load_normed(const T* head, const HeadNorm& norm, int64_t d, int64_t n) {
    const Vec value = load(head + d, n);
    return norm.weight ? mul(mul(value, norm.scale), load(norm.weight + d, n)) : value;
}

template <class T>
OCTAVO_INLINE Rotated rotate(const T* head, const HeadNorm& norm, const float* cos_sin, int64_t half, int64_t d) {
    const int64_t n = half - d;
    const Vec first = load_normed(head, norm, d, n), second = load_normed(head, norm, half + d, n);
    const Vec cos = load(cos_sin + d, n), sin = load(cos_sin + half + d, n);
    return {sub(mul(first, cos), mul(second, sin)), add(mul(second, cos), mul(first, sin))};
}

// One token's dims [d, d + n) into its lane of a key tile [head_dim][16].
template <class C>
OCTAVO_INLINE void store_key(C* lane, int64_t d, Vec value, int64_t n) {
    C buffer[kLanes];
    store(buffer, value);
    for (int64_t i = 0; i < kLanes && i < n; ++i) lane[(d + i) * kLanes] = buffer[i];
}

template <class T, class C>
void rope_token(const RopeWriteKVArgs& a, const T* qkv, T* q_out, C* cache, int64_t token) {
    const int64_t dim = a.cache.head_dim, half = dim / 2, num_kv_heads = a.cache.num_kv_heads;
    const float* cos_sin = a.cos_sin + a.positions[token] * dim;
    const T* head = qkv + token * (a.num_heads + 2 * num_kv_heads) * dim;
    T* q = q_out + token * a.num_heads * dim;
    for (int64_t h = 0; h < a.num_heads; ++h, head += dim, q += dim) {
        const HeadNorm norm = head_norm(a.q_norm, a.norm_eps, head, dim);
        for (int64_t d = 0; d < half; d += kLanes) {
            const Rotated r = rotate(head, norm, cos_sin, half, d);
            store(q + d, r.first, half - d);
            store(q + half + d, r.second, half - d);
        }
    }
    const int64_t slot = a.slot_mapping[token], offset = slot % a.cache.block_size;
    const int64_t size = a.cache.block_size * dim;  // of a head's keys, or values, in a block
    C* keys = cache + slot / a.cache.block_size * num_kv_heads * 2 * size;
    const T* value = head + num_kv_heads * dim;
    for (int64_t h = 0; h < num_kv_heads; ++h, head += dim, value += dim, keys += 2 * size) {
        C* lane = keys + offset / kLanes * kLanes * dim + offset % kLanes;
        const HeadNorm norm = head_norm(a.k_norm, a.norm_eps, head, dim);
        for (int64_t d = 0; d < half; d += kLanes) {
            const Rotated r = rotate(head, norm, cos_sin, half, d);
            store_key(lane, d, r.first, half - d);
            store_key(lane, half + d, r.second, half - d);
        }
        for (int64_t d = 0; d < dim; d += kLanes) store(keys + size + offset * dim + d, load(value + d));
    }
}

template <class T>
void write_token(const WriteKVArgs& a, const T* qkv, T* cache, int64_t token) {
    const int64_t dim = a.cache.head_dim, num_kv_heads = a.cache.num_kv_heads;
    const T* key = qkv + (token * (a.num_heads + 2 * num_kv_heads) + a.num_heads) * dim;
    const int64_t slot = a.slot_mapping[token], offset = slot % a.cache.block_size;
    const int64_t size = a.cache.block_size * dim;
    T* keys = cache + slot / a.cache.block_size * num_kv_heads * 2 * size;
    for (int64_t h = 0; h < num_kv_heads; ++h, key += dim, keys += 2 * size) {
        T* lane = keys + offset / kLanes * kLanes * dim + offset % kLanes;
        for (int64_t d = 0; d < dim; ++d) lane[d * kLanes] = key[d];
        __builtin_memcpy(keys + size + offset * dim, key + num_kv_heads * dim, dim * sizeof(T));
    }
}

}  // namespace

void write_kv(const WriteKVArgs& a) noexcept {
    const int64_t row = 2 * a.cache.num_kv_heads * a.cache.head_dim;
    with_type(a.cache.dtype, a.cache.data, [&](auto* cache) {
        const auto* qkv = as_type_of(cache, a.qkv);
        parallel_ranges(a.num_tokens, 8192 / row, [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; ++token) write_token(a, qkv, cache, token);
        });
    });
}

void rope_write_kv(const RopeWriteKVArgs& a) noexcept {
    const int64_t row = (a.num_heads + 2 * a.cache.num_kv_heads) * a.cache.head_dim;
    with_type(a.dtype, a.q_out, [&](auto* q_out) {
        const auto* qkv = as_type_of(q_out, a.qkv);
        with_type(a.cache.dtype, a.cache.data, [&](auto* cache) {
            parallel_ranges(a.num_tokens, 8192 / row, [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; ++token) rope_token(a, qkv, q_out, cache, token);
            });
        });
    });
}

}  // namespace octavo::OCTAVO_ISA
