// Slots of Python objects, read where they lie, without asking their class; and dictionaries.
//
// Works for classes with __slots__: each slot is a pointer at a fixed place of every instance.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <string>

namespace octavo::router {

namespace nb = nanobind;

// Takes over what an API function returned, or throws what it raised.
inline nb::object owned(PyObject* made) {
    if (made == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(made);
}

// One slot of a class.
class Slot {
  public:
    Slot(nb::handle type, const char* name) {
        const nb::object descriptor = type.attr(name);
        if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type) {
            throw nb::type_error((std::string(name) + " is not a slot of its class").c_str());
        }
        const auto* member = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr());
        offset_ = member->d_member->offset;
    }

    // Borrowed.
    PyObject* get(PyObject* object) const {
        PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
        if (value == nullptr) {
            PyErr_SetString(PyExc_AttributeError, "a slot is empty");
            throw nb::python_error();
        }
        return value;
    }

  private:
    Py_ssize_t offset_;
};

// What a dictionary holds under a key: borrowed, null where it holds nothing.
inline PyObject* look_up(nb::handle dictionary, nb::handle key) {
    PyObject* found = PyDict_GetItemWithError(dictionary.ptr(), key.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return found;
}

inline void put(nb::handle dictionary, nb::handle key, nb::handle value) {
    if (PyDict_SetItem(dictionary.ptr(), key.ptr(), value.ptr()) != 0) {
        throw nb::python_error();
    }
}

}  // namespace octavo::router
