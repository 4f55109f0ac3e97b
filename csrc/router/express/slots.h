// Attributes of Python objects, read and written where they lie, without asking their class.
//
// Works for classes with __slots__: each slot is a pointer at a fixed place of every instance. What
// the interpreter's own access would do is done here too: counting references, nothing else.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstdint>
#include <iterator>
#include <string>

namespace octavo::router {

namespace nb = nanobind;

inline int64_t to_int(PyObject* number) {
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return value;
}

inline double to_double(PyObject* number) {
    if (PyFloat_CheckExact(number)) {
        return PyFloat_AS_DOUBLE(number);
    }
    const double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return value;
}

// Takes over what an API function returned, or throws what it raised.
inline nb::object owned(PyObject* made) {
    if (made == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(made);
}

inline nb::object from_int(int64_t value) { return owned(PyLong_FromLongLong(value)); }

inline nb::object from_double(double value) { return owned(PyFloat_FromDouble(value)); }

inline nb::object from_bool(bool value) { return nb::borrow(value ? Py_True : Py_False); }

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
        PyObject* value = *place(object);
        if (value == nullptr) {
            PyErr_SetString(PyExc_AttributeError, "a slot is empty");
            throw nb::python_error();
        }
        return value;
    }
    void set(PyObject* object, nb::object value) const {
        PyObject** where = place(object);
        PyObject* before = *where;
        *where = value.release().ptr();
        Py_XDECREF(before);
    }

    int64_t as_int(PyObject* object) const { return to_int(get(object)); }
    double as_double(PyObject* object) const { return to_double(get(object)); }
    bool is_true(PyObject* object) const { return get(object) == Py_True; }
    bool is_none(PyObject* object) const { return get(object) == Py_None; }
    void add(PyObject* object, int64_t number) const {
        set(object, from_int(as_int(object) + number));
    }
    void add(PyObject* object, double number) const {
        set(object, from_double(as_double(object) + number));
    }

  private:
    PyObject** place(PyObject* object) const {
        return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

    Py_ssize_t offset_;
};

// A class whose slots are used. Subclasses may keep more, but not elsewhere; still only the class
// itself is taken, so that nobody's overriding is passed over.
struct Shape {
    nb::object type;

    Shape(const char* module, const char* name) : type(nb::module_::import_(module).attr(name)) {}

    bool fits(PyObject* object) const {
        return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(type.ptr());
    }
};

// An attribute of an object that has a dictionary, by a name that is made once.
class Attribute {
  public:
    explicit Attribute(const char* name) : name_(owned(PyUnicode_InternFromString(name))) {}

    nb::object get(nb::handle object) const {
        return owned(PyObject_GetAttr(object.ptr(), name_.ptr()));
    }
    void set(nb::handle object, const nb::object& value) const {
        if (PyObject_SetAttr(object.ptr(), name_.ptr(), value.ptr()) != 0) {
            throw nb::python_error();
        }
    }
    int64_t as_int(nb::handle object) const { return to_int(get(object).ptr()); }
    double as_double(nb::handle object) const { return to_double(get(object).ptr()); }
    void add(nb::handle object, int64_t number) const {
        set(object, from_int(as_int(object) + number));
    }
    // A method call.
    template <typename... Arguments>
    nb::object call(nb::handle object, const Arguments&... arguments) const {
        PyObject* all[] = {object.ptr(), arguments.ptr()...};
        return owned(PyObject_VectorcallMethod(name_.ptr(), all, std::size(all), nullptr));
    }

  private:
    nb::object name_;
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

inline void count_one(nb::handle dictionary, nb::handle key) {
    PyObject* before = look_up(dictionary, key);
    put(dictionary, key, from_int(before == nullptr ? 1 : to_int(before) + 1));
}

}  // namespace octavo::router
