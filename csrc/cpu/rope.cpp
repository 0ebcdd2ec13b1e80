// Rotary embedding of queries and keys, after a norm of each head where there is one, and the write of keys and values
// to the cache, rotated or as they are. A key or a value is quantised from its own head_dim numbers alone.
#include "kv_tile.h"

namespace octavo::OCTAVO_ISA {

namespace {

// Rotates dims [d, d + 16) and [d + head_dim / 2, …) of a head.
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

template <class T, class O>
OCTAVO_INLINE void rotate_head(const T* head, const HeadNorm& norm, const float* cos_sin, int64_t half, O* out) {
    for (int64_t d = 0; d < half; d += kLanes) {
        const Rotated r = rotate(head, norm, cos_sin, half, d);
        store(out + d, r.first, half - d);
        store(out + half + d, r.second, half - d);
    }
}

template <class C>
constexpr float kLargest = kInteger<C> ? 127.0f : 448.0f;

// Rounds a vector to the cache's type. Where that is quantised, its largest magnitude becomes kLargest and the scale is
// returned, which is NaN for a vector with a NaN or an infinity.
template <class C>
OCTAVO_INLINE float narrow(const float* x, C* out, int64_t dim) {
    float inverse = 1.0f, scale = 1.0f;
    if constexpr (kQuantized<C>) {
        const Vec zero = set1(0.0f);
        Vec magnitude = zero, poison = zero;
        for (int64_t d = 0; d < dim; d += kLanes) {
            const Vec v = load(x + d);
            magnitude = max(magnitude, max(v, sub(zero, v)));
            poison = fma(v, zero, poison);
        }
        const float largest = reduce_max(magnitude);
        inverse = largest > 0x1p-118f ? kLargest<C> / largest : 0.0f;  // below, it would overflow
        scale = largest / kLargest<C> + reduce_add(poison);
    }
    const Vec shift = set1(0x1.8p23f);  // adding it rounds to an integer
    for (int64_t d = 0; d < dim; d += kLanes) {
        const Vec v = load(x + d);
        if constexpr (sizeof(C) > 1) store(out + d, v);
        else if constexpr (kInteger<C>) store(out + d, sub(fma(v, set1(inverse), shift), shift));
        else store(out + d, mul(v, set1(inverse)));
    }
    return scale;
}

// Stores one token's key and value of one head.
template <class C>
OCTAVO_INLINE void write_head(const KVCache& cache, C* data, int64_t slot, int64_t head, const float* key,
                              const float* value) {
    const int64_t dim = cache.head_dim, offset = slot % cache.block_size, position = offset % kLanes;
    C* keys = key_tiles(cache, data, slot / cache.block_size, head) + offset / kLanes * tile_size<C>(dim);
    C* values = keys + cache.block_size / kLanes * tile_size<C>(dim);
    C row[kMaxHeadDim];
    const float key_scale = narrow(key, row, dim);
    for (int64_t d = 0; d < dim; ++d) keys[key_index<C>(d, position)] = row[d];
    const float value_scale = narrow(value, row, dim);
    for (int64_t d = 0; d < dim; ++d) values[value_index<C>(position, d, dim)] = row[d];
    if constexpr (kQuantized<C>) {
        tile_scales(keys, dim)[position] = key_scale;
        tile_scales(values, dim)[position] = value_scale;
    }
}

template <class T>
OCTAVO_INLINE void widen_head(const T* head, float* out, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(head + d));
}

template <class T, class C>
void rope_token(const RopeWriteKVArgs& a, const T* qkv, T* q_out, C* cache, int64_t token) {
    const int64_t dim = a.cache.head_dim, half = dim / 2, num_kv_heads = a.cache.num_kv_heads;
    const float* cos_sin = a.cos_sin + a.positions[token] * dim;
    const T* head = qkv + token * (a.num_heads + 2 * num_kv_heads) * dim;
    T* q = q_out + token * a.num_heads * dim;
    for (int64_t h = 0; h < a.num_heads; ++h, head += dim, q += dim)
        rotate_head(head, head_norm(a.q_norm, a.norm_eps, head, dim), cos_sin, half, q);
    for (int64_t h = 0; h < num_kv_heads; ++h, head += dim) {
        float key[kMaxHeadDim], value[kMaxHeadDim];
        rotate_head(head, head_norm(a.k_norm, a.norm_eps, head, dim), cos_sin, half, key);
        widen_head(head + num_kv_heads * dim, value, dim);
        write_head(a.cache, cache, a.slot_mapping[token], h, key, value);
    }
}

template <class T, class C>
void write_token(const WriteKVArgs& a, const T* qkv, C* cache, int64_t token) {
    const int64_t dim = a.cache.head_dim, num_kv_heads = a.cache.num_kv_heads;
    const T* head = qkv + (token * (a.num_heads + 2 * num_kv_heads) + a.num_heads) * dim;
    for (int64_t h = 0; h < num_kv_heads; ++h, head += dim) {
        float key[kMaxHeadDim], value[kMaxHeadDim];
        widen_head(head, key, dim);
        widen_head(head + num_kv_heads * dim, value, dim);
        write_head(a.cache, cache, a.slot_mapping[token], h, key, value);
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
        with_cache_type(a.cache, [&](auto* cache) {
            parallel_ranges(a.num_tokens, 8192 / row, [&](int64_t first, int64_t last) {
                for (int64_t token = first; token < last; ++token) rope_token(a, qkv, q_out, cache, token);
            });
        });
    });
}

}  // namespace octavo::OCTAVO_ISA
