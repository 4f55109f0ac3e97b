// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

namespace octavo {

namespace nb = nanobind;

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntTables = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The array's values; empty for an absent one.
template <class T, class... Config>
std::span<const std::remove_const_t<T>> span_of(const nb::ndarray<T, Config...>& array) {
    return {array.data(), array.size()};
}
template <class Array>
auto span_of(const std::optional<Array>& array) {
    return array ? span_of(*array) : decltype(span_of(*array)){};
}

// A new array of that shape, and where its values go.
template <class T, size_t Dims>
struct NewArray {
    explicit NewArray(const std::array<size_t, Dims>& shape) {
        size_t count = 1;
        for (const size_t side : shape) {
            count *= side;
        }
        auto owned = std::make_unique<T[]>(count);
        data = owned.get();
        const nb::capsule owner(owned.release(),
                                [](void* values) noexcept { delete[] static_cast<T*>(values); });
        array = nb::ndarray<nb::numpy, T>(data, Dims, shape.data(), owner);
    }

    T* data;
    nb::ndarray<nb::numpy, T> array;
};

// sampling: bindings_sampling.cpp
void bind_sampling(nb::module_& module);

// KVCache and Program: bindings_program.cpp
void bind_program(nb::module_& module);

}  // namespace octavo
