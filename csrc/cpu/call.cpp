#include "call.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace nb = nanobind;

namespace octavo {

namespace {

using nb::dlpack::dtype_code;
using ScalarType = nb::dlpack::dtype;

// What a type's __dlpack_c_exchange_api__ leads to (DLPack 1.3), up to the one function that is used here.
struct ExchangeApi {
    uint32_t major, minor;
    const void* previous;
    void *allocate, *from_object, *to_object;
    int (*view)(void* object, nb::dlpack::dltensor* out);  // lends what the object has; or null
};

const ExchangeApi* exchange_api(PyTypeObject* type) {
    const nb::object capsule =
        nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
    const void* data = capsule ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr;
    if (!data) PyErr_Clear();
    const auto* api = static_cast<const ExchangeApi*>(data);
    return api && api->major == 1 && api->view ? api : nullptr;
}

// A tensor of any library, as long as its Python object lives. Libraries without the exchange API, such as numpy and
// torch before 2.10, are asked by nanobind, which takes some microseconds.
class Tensor {
public:
    Tensor(const char* name, nb::handle object) {
        static PyTypeObject* type = nullptr;  // the last one's
        static const ExchangeApi* api = nullptr;
        if (Py_TYPE(object.ptr()) != type) {
            api = exchange_api(Py_TYPE(object.ptr()));
            type = Py_TYPE(object.ptr());
        }
        if (api) {
            if (api->view(object.ptr(), &tensor_) != 0) nb::raise_python_error();
            return;
        }
        if (!nb::try_cast(object, array_))
            throw nb::type_error((std::string(name) + " must be a tensor, not " + nb::repr(object).c_str()).c_str());
        tensor_.data = array_.data();
        tensor_.device = {array_.device_type(), array_.device_id()};
        tensor_.ndim = static_cast<int32_t>(array_.ndim());
        tensor_.dtype = array_.dtype();
        tensor_.shape = const_cast<int64_t*>(array_.shape_ptr());
        tensor_.strides = const_cast<int64_t*>(array_.stride_ptr());
    }

    const nb::dlpack::dltensor* operator->() const { return &tensor_; }
    void* data() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }

    int64_t count() const {
        int64_t result = 1;
        for (int i = 0; i < tensor_.ndim; ++i) result *= tensor_.shape[i];
        return result;
    }

    bool is_contiguous() const {
        if (!tensor_.strides) return true;
        bool result = true;
        int64_t step = 1;
        for (int i = tensor_.ndim - 1; i >= 0; --i) {
            result &= tensor_.shape[i] == 1 || tensor_.strides[i] == step;
            step *= tensor_.shape[i];
        }
        return result || step == 0;
    }

private:
    nb::dlpack::dltensor tensor_ = {};
    nb::ndarray<> array_;
};

constexpr ScalarType scalar(dtype_code code, uint8_t bits) { return {static_cast<uint8_t>(code), bits, 1}; }

// DType's, in its order: first those of activations, then those that only a KV cache has.
constexpr ScalarType kDTypes[] = {scalar(dtype_code::Float, 32), scalar(dtype_code::Bfloat, 16),
                                  scalar(dtype_code::Float, 16), scalar(dtype_code::Int, 8),
                                  scalar(dtype_code::Float8_E4M3FN, 8)};
constexpr int kNumActivations = 3, kNumKinds = 5;

std::string text(ScalarType dtype) {
    constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
    if (dtype.code < std::size(kNames)) return kNames[dtype.code] + std::to_string(dtype.bits);
    if (dtype == kDTypes[static_cast<int>(DType::f8)]) return "float8_e4m3fn";
    if (dtype.code == static_cast<uint8_t>(dtype_code::Bool)) return "bool";
    return "DLPack's dtype " + std::to_string(dtype.code);
}

std::string tuple(const std::vector<int64_t>& sizes) {
    std::string out = "(";
    for (const int64_t size : sizes) out += (out.size() > 1 ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
    return out + (sizes.size() == 1 ? ",)" : ")");
}

std::string text(const Tensor& tensor) {
    const std::vector<int64_t> sizes(tensor->shape, tensor->shape + tensor->ndim);
    return tuple(sizes) + " " + text(tensor->dtype) + (tensor.is_contiguous() ? "" : ", not contiguous");
}

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

DType kind_of(const char* name, ScalarType dtype, bool is_cache) {
    const int num_kinds = is_cache ? kNumKinds : kNumActivations;
    std::string names;
    for (int i = 0; i < num_kinds; ++i) {
        if (dtype == kDTypes[i]) return static_cast<DType>(i);
        names += (i == 0 ? "" : i + 1 < num_kinds ? ", " : " and ") + text(kDTypes[i]);
    }
    throw nb::type_error((std::string(name) + " is of " + text(dtype) + ", but the cpu kernels have " +
                          (is_cache ? "KV caches of " : "activations and weights of ") + names)
                             .c_str());
}

void check_head_dim(int64_t head_dim) {
    if (head_dim < 16 || head_dim > kMaxHeadDim || head_dim % 16)
        refuse("the cpu kernels handle head sizes that are multiples of 16 up to " + std::to_string(kMaxHeadDim) +
               ", not " + std::to_string(head_dim));
}

}  // namespace

void check_cache_sizes(int64_t block_size, int64_t head_dim) {
    if (block_size < 16 || block_size % 16)
        refuse("block size " + std::to_string(block_size) + " is not a multiple of 16. Choose another --block-size");
    check_head_dim(head_dim);
}

void Call::end() const {
    if (num_read_ == arguments_.size()) return;
    throw nb::type_error((std::string(op_) + " takes " + std::to_string(num_read_) + " arguments, not " +
                          std::to_string(arguments_.size()))
                             .c_str());
}

nb::handle Call::next() {
    if (num_read_ < arguments_.size()) return arguments_[num_read_++];
    throw nb::type_error((std::string(op_) + " takes more than " + std::to_string(num_read_) + " arguments").c_str());
}

void Call::refuse_number(const char* name) const {
    const nb::handle value = arguments_[num_read_ - 1];
    throw nb::type_error((std::string(name) + " must be a number, not " + nb::repr(value).c_str()).c_str());
}

int64_t Call::size_of(const Size& size) const {
    if (!size.field) return size.value;
    return is_known(size.field) ? *size.field + size.value : -1;
}

std::string Call::text(const Wanted& wanted, Shape shape, const int64_t* actual, int num_actual) const {
    std::vector<int64_t> sizes;
    for (const Size& size : shape) {
        const int64_t known = size_of(size), place = static_cast<int64_t>(sizes.size());
        sizes.push_back(known >= 0 || place >= num_actual ? known : std::max(actual[place], size.value));
    }
    if (wanted.record_bytes) sizes.push_back(wanted.record_bytes);
    std::string out = wanted.is_flat ? std::to_string(sizes[0]) + " elements" : tuple(sizes);
    if (wanted.dtype.bits) out += " " + octavo::text(wanted.dtype);
    if (wanted.item_bytes && is_known(wanted.item_bytes)) out += " of " + std::to_string(*wanted.item_bytes) + " bytes";
    return out;
}

void* Call::read_tensor(const char* name, Wanted wanted, Shape shape) {
    const nb::handle object = next();
    if (wanted.or_none && object.is_none()) return nullptr;
    const Tensor tensor(name, object);
    if (tensor->device.device_type != nb::device::cpu::value)
        refuse(std::string(name) + " must be in the CPU's memory");

    const Kind* kind = wanted.kind;
    const bool is_any_kind = kind && kind->field && !is_known(kind->field);
    if (kind && !is_any_kind) wanted.dtype = kDTypes[static_cast<int>(kind->field ? *kind->field : kind->value)];
    const int64_t item_bytes = tensor->dtype.bits / 8, count = tensor.count();
    const int num_sizes = static_cast<int>(shape.size());
    const int64_t* sizes = wanted.is_flat ? &count : tensor->shape;

    bool fits = tensor.is_contiguous() && (!wanted.dtype.bits || tensor->dtype == wanted.dtype);
    if (wanted.item_bytes && is_known(wanted.item_bytes)) fits &= item_bytes == *wanted.item_bytes;
    if (!wanted.is_flat) fits &= tensor->ndim == num_sizes + (wanted.record_bytes != 0);
    if (fits && wanted.record_bytes) fits &= sizes[num_sizes] == wanted.record_bytes;
    for (int i = 0; fits && i < num_sizes; ++i) {
        const Size& size = shape.begin()[i];
        const int64_t known = size_of(size);
        fits &= known >= 0 ? sizes[i] == known : sizes[i] >= size.value;
    }
    if (!fits)
        refuse(std::string(name) + " must be contiguous " +
               text(wanted, shape, sizes, wanted.is_flat ? 1 : tensor->ndim) + ", not " + octavo::text(tensor));

    if (is_any_kind) {
        *kind->field = kind_of(name, tensor->dtype, false);
        learn(kind->field);
    }
    if (wanted.item_bytes) {
        *wanted.item_bytes = item_bytes;
        learn(wanted.item_bytes);
    }
    for (int i = 0; i < num_sizes; ++i) {
        const Size& size = shape.begin()[i];
        if (!size.field) continue;
        *size.field = sizes[i] - size.value;
        learn(size.field);
    }
    return tensor.data();
}

DType Call::kind_of_next(const char* name, bool is_cache) {
    const Tensor tensor(name, next());
    --num_read_;
    return kind_of(name, tensor->dtype, is_cache);
}

void Call::matrix(const char* name, const void*& packed, DType& dtype, int64_t& num_rows, int64_t& num_cols) {
    number("num_rows", num_rows);
    number("num_cols", num_cols);
    dtype = kind_of_next(name, false);
    learn(&dtype);
    tensor(name, packed, dtype, {packed_size(num_rows, num_cols, dtype)});
}

void Call::matrix(const char* name, const void*& packed, QuantizedForm& form, int64_t& num_rows, int64_t& num_cols) {
    this->form("form", form);
    number("num_rows", num_rows);
    number("num_cols", num_cols);
    bytes(name, packed, packed_quantized_bytes(num_rows, num_cols, form));
}

void Call::form(const char* name, QuantizedForm& form) {
    nb::tuple codes;
    if (!nb::try_cast(next(), codes) || codes.size() != 5) refuse_number(name);
    form = {nb::cast<int32_t>(codes[0]), nb::cast<int32_t>(codes[1]), nb::cast<int32_t>(codes[2]),
            nb::cast<bool>(codes[3]), nb::cast<bool>(codes[4])};
    const bool has_groups = form.group == 32 || (form.group == 16 && form.wide_scales);
    if ((form.bits != 4 && form.bits != 8) || !has_groups)
        refuse("the cpu kernels don't have the form of " + std::to_string(form.bits) + " bits in groups of " +
               std::to_string(form.group) + " with float" + (form.wide_scales ? "32" : "16") + " scales");
}

void Call::cache(const char* name, KVCache& cache) {
    cache.dtype = kind_of_next(name, true);
    learn(&cache.dtype);
    const int64_t scale_bytes = cache.dtype == DType::int8 || cache.dtype == DType::f8 ? 4 : 0;
    tensor(name, cache.data, cache.dtype,
           {cache.num_blocks, cache.num_kv_heads, 2, cache.block_size, cache.head_dim + scale_bytes});
    check_cache_sizes(cache.block_size, cache.head_dim);
}

void Call::head_dim(int64_t head_dim) { check_head_dim(head_dim); }

void Call::shares(const char* shared_by, int64_t num_sharers, const char* shared, int64_t num_shared) {
    if (num_shared < 1 || num_sharers % num_shared)
        refuse(std::to_string(num_sharers) + " " + shared_by + " can't share " + std::to_string(num_shared) + " " +
               shared + " evenly");
}

}  // namespace octavo
