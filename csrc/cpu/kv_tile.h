// How a block of the KV cache is laid out: keys and values of a head in tiles of 16 positions, one after the other.
//
// A tile has the head_dim elements of each position, then, where they are quantised, the positions' 16 scales (float32).
// Element d of position p lies at [d / P][p][d % P] in a tile of keys, at [p / P][d][p % P] in a tile of values, where P
// is how many elements a lane of the kernels multiplies at once. Sizes count elements.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {

template <class C>
constexpr bool kQuantized = sizeof(C) == 1;
template <class C>
constexpr bool kInteger = false;
template <>
inline constexpr bool kInteger<int8_t> = true;
template <class C>
constexpr int64_t kPair = 1;
template <>
inline constexpr int64_t kPair<bf16> = 2;
template <>
inline constexpr int64_t kPair<int8_t> = 2;

template <class C>
constexpr int64_t tile_size(int64_t head_dim) {
    return kLanes * (head_dim + (kQuantized<C> ? int64_t{sizeof(float)} : 0));
}
template <class C>
constexpr int64_t key_index(int64_t d, int64_t position) {
    return (d / kPair<C> * kLanes + position) * kPair<C> + d % kPair<C>;
}
template <class C>
constexpr int64_t value_index(int64_t position, int64_t d, int64_t head_dim) {
    return (position / kPair<C> * head_dim + d) * kPair<C> + position % kPair<C>;
}
template <class C>
OCTAVO_INLINE const float* tile_scales(const C* tile, int64_t head_dim) {
    return static_cast<const float*>(static_cast<const void*>(tile + kLanes * head_dim));
}
template <class C>
OCTAVO_INLINE float* tile_scales(C* tile, int64_t head_dim) {
    return static_cast<float*>(static_cast<void*>(tile + kLanes * head_dim));
}

// Where a head's first tile of keys lies in a block. The values follow `block_size / 16` tiles further.
template <class C>
OCTAVO_INLINE C* key_tiles(const KVCache& cache, C* data, int64_t block, int64_t head) {
    return data + (block * cache.num_kv_heads + head) * 2 * (cache.block_size / kLanes) * tile_size<C>(cache.head_dim);
}

// Calls fn with a pointer of the cache's element type.
template <class Fn>
OCTAVO_INLINE void with_cache_type(const KVCache& cache, const Fn& fn) {
    if (cache.dtype == DType::int8) return fn(static_cast<int8_t*>(cache.data));
    if (cache.dtype == DType::f8) return fn(static_cast<f8*>(cache.data));
    with_type(cache.dtype, cache.data, fn);
}

}  // namespace octavo::OCTAVO_ISA
