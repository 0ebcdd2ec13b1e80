// A call of an op from Python, taken apart by the op's description: tensors by DLPack, numbers as they are. Whatever
// does not fit is a ValueError or TypeError that names the argument, what is wanted and what came.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <type_traits>

#include "describe.h"

namespace octavo {

// Raises ValueError for a KV cache that the kernels don't handle.
void check_cache_sizes(int64_t block_size, int64_t head_dim);

// A visitor that reads one positional argument for each that is described, into the fields that are described.
// Invariant: `known_` has a bit for each four bytes of the fields: whether an argument has told what is there.
class Call {
public:
    template <class Args>
    Call(const char* op, const nanobind::args& arguments, Args& fields)
        : op_(op), arguments_(arguments), fields_(reinterpret_cast<const char*>(&fields)) {
        static_assert(sizeof(Args) <= 4 * 64);
    }
    // Raises TypeError for arguments that were not read.
    void end() const;

    void rows(int64_t&) {}
    void requests(int64_t&) {}
    template <class T>
    void number(const char* name, T& value) {
        if (!nanobind::try_cast(next(), value)) refuse_number(name);
        learn(&value);
    }
    template <class T>
    void tensor(const char* name, T*& pointer, Shape shape) {
        read(pointer, name, wanted<T>(), shape);
    }
    template <class T>
    void tensor(const char* name, T*& pointer, Kind kind, Shape shape) {
        read(pointer, name, {.kind = &kind}, shape);
    }
    template <class T>
    void optional(const char* name, T*& pointer, Shape shape) {
        Wanted optional = wanted<T>();
        optional.or_none = true;
        read(pointer, name, optional, shape);
    }
    template <class T>
    void flat(const char* name, T*& pointer, int64_t& count) {
        Wanted flat = wanted<T>();
        flat.is_flat = true;
        read(pointer, name, flat, {count});
    }
    template <class T>
    void flat(const char* name, T*& pointer, Kind kind, int64_t& count) {
        read(pointer, name, {.kind = &kind, .is_flat = true}, {count});
    }
    template <class T>
    void any(const char* name, T*& pointer, int64_t& item_bytes, Shape shape) {
        read(pointer, name, {.item_bytes = &item_bytes}, shape);
    }
    template <class T>
    void bytes(const char* name, T*& pointer, int64_t num_bytes) {
        read(pointer, name, wanted<uint8_t>(), {+num_bytes});
    }
    void indices(const char* name, const int32_t*& values, int64_t& count, int64_t) { tensor(name, values, {count}); }
    void starts(const char* name, const int32_t*& starts, int64_t& num_requests, int64_t&) {
        tensor(name, starts, {Size(num_requests, 1)});
    }
    void matrix(const char* name, const void*& packed, DType& dtype, int64_t& num_rows, int64_t& num_cols);
    void matrix(const char* name, const void*& packed, QuantizedForm& form, int64_t& num_rows, int64_t& num_cols);
    void form(const char* name, QuantizedForm& form);
    void cache(const char* name, KVCache& cache);
    void head_dim(int64_t head_dim);
    void shares(const char* shared_by, int64_t num_sharers, const char* shared, int64_t num_shared);
    void reads_blocks(const AttentionArgs&) {}

private:
    using ScalarType = nanobind::dlpack::dtype;

    // What a tensor must be beside its shape: of `kind`, or of `dtype`, or of items of so many bytes.
    struct Wanted {
        const Kind* kind = nullptr;
        ScalarType dtype = {};
        int64_t* item_bytes = nullptr;
        int64_t record_bytes = 0;  // its shape ends with a dimension of so many
        bool is_flat = false;      // so many elements in any shape
        bool or_none = false;
    };

    template <class T>
    static Wanted wanted() {
        if constexpr (std::is_same_v<T, SampleRow>)
            return {.dtype = nanobind::dtype<uint8_t>(), .record_bytes = sizeof(SampleRow)};
        else
            return {.dtype = nanobind::dtype<std::remove_const_t<T>>()};
    }
    template <class T>
    void read(T*& pointer, const char* name, const Wanted& wanted, Shape shape) {
        pointer = static_cast<T*>(read_tensor(name, wanted, shape));
    }
    // The address of the next argument's elements, null for None. Fields that its sizes and its dtype tell are set.
    void* read_tensor(const char* name, Wanted wanted, Shape shape);
    // The next argument's dtype, without reading on. Raises TypeError for one that the kernels lack.
    DType kind_of_next(const char* name, bool is_cache);
    // The size that a tensor is wanted to have, or -1 where that is not known.
    int64_t size_of(const Size& size) const;
    // What is wanted, in words; of sizes that are not known, the actual ones.
    std::string text(const Wanted& wanted, Shape shape, const int64_t* actual, int num_actual) const;

    nanobind::handle next();
    [[noreturn]] void refuse_number(const char* name) const;
    uint64_t bit(const void* field) const { return uint64_t{1} << ((static_cast<const char*>(field) - fields_) / 4); }
    bool is_known(const void* field) const { return (known_ & bit(field)) != 0; }
    void learn(const void* field) { known_ |= bit(field); }

    const char* op_;
    const nanobind::args& arguments_;
    const char* fields_;
    size_t num_read_ = 0;
    uint64_t known_ = 0;
};

}  // namespace octavo
