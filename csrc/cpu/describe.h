// What the descriptions of ops.h are made of, and a visitor that ignores all of it.
#pragma once

#include <initializer_list>

#include "ops.h"

namespace octavo {

// One size of a tensor. A field of the arguments is told by the first tensor that has it, and holds for the others;
// what is computed from fields holds for this tensor.
struct Size {
    Size(int64_t& field, int64_t more = 0) : field(&field), value(more) {}
    Size(int64_t&& value) : field(nullptr), value(value) {}
    int64_t* field;
    int64_t value;  // that the size is, or is more than the field
};
using Shape = std::initializer_list<Size>;

// Likewise a tensor's dtype. One that a field is told is a dtype of activations.
struct Kind {
    Kind(DType& field) : field(&field), value() {}
    Kind(DType&& value) : field(nullptr), value(value) {}
    DType* field;
    DType value;
};

// To derive visitors from. They change no argument that they don't say they change.
struct Ignore {
    // The size of whatever a step has one of for each of its rows (tokens), or for each of its requests.
    void rows(int64_t&) {}
    void requests(int64_t&) {}

    // A number, or a bool.
    template <class T>
    void number(const char*, T&) {}
    // A contiguous tensor. Where no dtype is given, the pointer's type says it; a SampleRow is its bytes, in a last
    // dimension of their own.
    template <class T>
    void tensor(const char*, T*&, Shape) {}
    template <class T>
    void tensor(const char*, T*&, Kind, Shape) {}
    // Likewise, or None.
    template <class T>
    void optional(const char*, T*&, Shape) {}
    // A tensor of `count` elements in any shape.
    template <class T>
    void flat(const char*, T*&, int64_t&) {}
    template <class T>
    void flat(const char*, T*&, Kind, int64_t&) {}
    // A tensor of elements of any kind that have this many bytes.
    template <class T>
    void any(const char*, T*&, int64_t&, Shape) {}
    // `num_bytes` bytes, a tensor of uint8.
    template <class T>
    void bytes(const char*, T*&, int64_t) {}
    // A tensor of `count` indices in [0, limit).
    void indices(const char*, const int32_t*&, int64_t&, int64_t) {}
    // A tensor of num_requests + 1 indices, from 0 to num_rows and never falling.
    void starts(const char*, const int32_t*&, int64_t&, int64_t&) {}
    // A matrix that `pack` has laid out, behind its numbers of rows and columns; a quantised one's form comes before
    // them.
    void matrix(const char*, const void*&, DType&, int64_t&, int64_t&) {}
    void matrix(const char*, const void*&, QuantizedForm&, int64_t&, int64_t&) {}
    // A tuple (bits, group, zero, has_mins, wide_scales).
    void form(const char*, QuantizedForm&) {}
    // A layer's KV cache for heads of a size that is known already.
    void cache(const char*, KVCache&) {}

    // No arguments but facts. That the kernels have heads of this size:
    void head_dim(int64_t) {}
    // That the first, so many, can share the second evenly.
    void shares(const char*, int64_t, const char*, int64_t) {}
    // Every block that attention will read is in the cache.
    void reads_blocks(const AttentionArgs&) {}
};

}  // namespace octavo
