#include "router/bundle.h"

#include <vector>

#include "router/slots.h"

namespace octavo::router {

namespace {

class Sorter {
  public:
    Sorter(nb::handle type, nb::handle kind, nb::handle columns)
        : type_(nb::borrow(type)), kind_(slots_of(type, kind)), columns_(slots_of(type, columns)) {}

    // One row for each kind, in the order in which they came: the records, then the columns.
    nb::list sort_out(const nb::list& records) const {
        nb::list rows;
        nb::dict by_kind;
        PyObject* last = nullptr;
        nb::object row;
        for (const nb::handle record : records) {
            if (Py_TYPE(record.ptr()) != reinterpret_cast<PyTypeObject*>(type_.ptr())) {
                throw nb::type_error("a record of the sorter's own class was expected");
            }
            // Neighbours are mostly alike, and that is seen without hashing.
            if (last == nullptr || !is_alike(last, record.ptr())) {
                row = row_of(record.ptr(), by_kind, rows);
            }
            last = record.ptr();
            append(row, 0, last);
            for (size_t i = 0; i < columns_.size(); ++i) {
                append(row, i + 1, columns_[i].get(last));
            }
        }
        return rows;
    }

  private:
    static std::vector<Slot> slots_of(nb::handle type, nb::handle names) {
        std::vector<Slot> slots;
        for (const nb::handle name : names) {
            slots.emplace_back(type, nb::cast<nb::str>(name).c_str());
        }
        return slots;
    }

    static void append(const nb::object& row, size_t at, PyObject* value) {
        if (PyList_Append(PyList_GET_ITEM(row.ptr(), static_cast<Py_ssize_t>(at)), value) != 0) {
            throw nb::python_error();
        }
    }

    bool is_alike(PyObject* one, PyObject* other) const {
        for (const Slot& slot : kind_) {
            const int equal = PyObject_RichCompareBool(slot.get(one), slot.get(other), Py_EQ);
            if (equal < 0) {
                throw nb::python_error();
            }
            if (equal == 0) {
                return false;
            }
        }
        return true;
    }

    nb::object row_of(PyObject* record, nb::dict& by_kind, nb::list& rows) const {
        const nb::object kind = owned(PyTuple_New(static_cast<Py_ssize_t>(kind_.size())));
        for (size_t i = 0; i < kind_.size(); ++i) {
            PyTuple_SET_ITEM(kind.ptr(), static_cast<Py_ssize_t>(i),
                             Py_NewRef(kind_[i].get(record)));
        }
        if (PyObject* known = look_up(by_kind, kind); known != nullptr) {
            return nb::borrow(known);
        }
        nb::list row;
        for (size_t i = 0; i <= columns_.size(); ++i) {
            row.append(nb::list());
        }
        put(by_kind, kind, row);
        rows.append(row);
        return row;
    }

    nb::object type_;
    std::vector<Slot> kind_, columns_;
};

}  // namespace

void bind_bundle(nb::module_& module) {
    nb::class_<Sorter>(module, "Sorter")
        .def(nb::init<nb::handle, nb::handle, nb::handle>())
        .def("sort_out", &Sorter::sort_out);
}

}  // namespace octavo::router
