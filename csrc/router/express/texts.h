// Small texts between Python and C++: views of them, and joining them.
#pragma once

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <string_view>

#include "router/express/slots.h"

namespace octavo::router {

inline nb::object from(const char* module, const char* name) {
    return nb::module_::import_(module).attr(name);
}

inline std::string_view bytes_view(PyObject* bytes) {
    if (!PyBytes_Check(bytes)) {
        throw nb::type_error("bytes were expected");
    }
    return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

inline std::string_view text_view(PyObject* text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) {
        throw nb::python_error();
    }
    return {data, static_cast<size_t>(size)};
}

inline nb::object text_of(std::string_view text) {
    return owned(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

inline bool is_empty_text(PyObject* text) { return PyUnicode_GET_LENGTH(text) == 0; }

inline nb::object join(std::initializer_list<std::string_view> parts) {
    size_t size = 0;
    for (const std::string_view part : parts) {
        size += part.size();
    }
    nb::object joined = owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* end = PyBytes_AS_STRING(joined.ptr());
    for (const std::string_view part : parts) {
        end = std::copy(part.begin(), part.end(), end);
    }
    return joined;
}

// A number as decimal digits.
class Digits {
  public:
    explicit Digits(size_t number)
        : size_(static_cast<size_t>(std::to_chars(text_, text_ + sizeof text_, number).ptr -
                                    text_)) {}
    std::string_view view() const { return {text_, size_}; }

  private:
    char text_[20];
    size_t size_;
};

}  // namespace octavo::router
