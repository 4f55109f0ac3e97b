// The module octavo_engine._native: the machine, Team, Packed; the rest in bindings_*.cpp.
#include "bindings.h"

#include <limits>

#include "common/check.h"
#include "common/crc32.h"
#include "common/machine.h"
#include "common/ranks.h"
#include "common/ring.h"
#include "common/team.h"
#include "cpu/isa.h"
#include "cpu/quants.h"
#include "cpu/runnable.h"
#include "packed.h"

namespace octavo {

namespace {

StoredType checked_type(const std::string& name) {
    const std::optional<StoredType> type = stored_type(name);
    check(type.has_value(), "stored dtype '", name, "' is not known");
    return *type;
}

std::span<const std::byte> bytes_of(const Bytes& data) {
    return {reinterpret_cast<const std::byte*>(data.data()), data.size()};
}

nb::object dequantized(const Bytes& data, const std::string& source_dtype, int64_t num_values) {
    const StoredType type = checked_type(source_dtype);
    check(num_values >= 0 && num_values % block_values(type) == 0, "dequantize: ", num_values,
          " values are not whole blocks of ", block_values(type));
    const int64_t expected = num_values / block_values(type) * block_bytes(type);
    check(static_cast<int64_t>(data.size()) == expected, "dequantize: data has ", data.size(),
          " bytes, but ", num_values, " values take ", expected);
    NewArray<float, 1> result({static_cast<size_t>(num_values)});
    {
        const nb::gil_scoped_release release;
        dequantize(type, bytes_of(data).data(), num_values, result.data);
    }
    return nb::cast(result.array);
}

// Of whatever has bytes: arrays, memoryviews, bytes.
uint32_t checksum(const nb::object& data, uint32_t value) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) {
        throw nb::python_error();
    }
    {
        const nb::gil_scoped_release release;
        value =
            crc32({static_cast<const std::byte*>(view.buf), static_cast<size_t>(view.len)}, value);
    }
    PyBuffer_Release(&view);
    return value;
}

void bind_machine(nb::module_& module) {
    module.def("crc32", &checksum, nb::arg(), nb::arg() = 0);
    module.def("cpu_features", [] {
        nb::dict features;
        for (const Feature& feature : cpu_features()) {
            features[feature.name.c_str()] = feature.present;
        }
        return features;
    });
    module.def("available_isas", [] {
        nb::list names;
        for (const cpu::Kernels* kernels : cpu::available_kernels()) {
            names.append(kernels->isa);
        }
        return names;
    });
    module.def("runnable_isas", &cpu::runnable_isas);
    module.def("available_cores", &available_cores, nb::arg("cgroups") = "/sys/fs/cgroup",
               nb::arg("membership") = "/proc/self/cgroup");
    nb::class_<Team>(module, "Team", nb::is_weak_referenceable())
        .def(nb::init<int, const std::string&, std::vector<std::vector<int>>>(),
             nb::arg("num_threads"), nb::arg("isa") = "",
             nb::arg("cpus") = std::vector<std::vector<int>>())
        .def_prop_ro("num_threads", &Team::num_threads)
        .def_prop_ro("num_barriers", &Team::num_barriers)
        .def_prop_ro("isa", [](const Team& team) { return team.kernels().isa; });
}

std::vector<Packed::Part> parsed_parts(const std::vector<std::pair<int64_t, std::string>>& parts) {
    std::vector<Packed::Part> parsed;
    for (const auto& [rows, dtype] : parts) {
        parsed.push_back({rows, parse_packing(dtype)});
    }
    return parsed;
}

nb::object taken(Ring& ring, double patience_s) {
    std::optional<std::vector<std::byte>> message;
    {
        const nb::gil_scoped_release release;
        message = ring.take(patience_s);
    }
    return message ? nb::object(nb::bytes(message->data(), message->size())) : nb::none();
}

void bind_ranks(nb::module_& module) {
    nb::class_<Ranks>(module, "Ranks", nb::is_weak_referenceable())
        .def(nb::init<int, int, int, int, double>(), nb::arg("rank"), nb::arg("size"),
             nb::arg("workers_per_rank"), nb::arg("file"), nb::arg("patience_s"))
        .def_prop_ro("rank", &Ranks::rank)
        .def_prop_ro("size", &Ranks::size)
        .def_prop_ro("failed", &Ranks::failed)
        .def("barrier", &Ranks::barrier, nb::call_guard<nb::gil_scoped_release>())
        .def("fail", &Ranks::fail, nb::arg("rank"))
        .def("begin_step", &Ranks::begin_step, nb::arg("number"))
        .def("await_step", &Ranks::await_step, nb::arg("number"), nb::arg("timeout_s"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("join", &Ranks::join)
        .def_prop_ro("num_joined", &Ranks::num_joined);
    nb::class_<Ring>(module, "Ring", nb::is_weak_referenceable())
        .def(nb::init<int, int, int, int64_t>(), nb::arg("rank"), nb::arg("size"), nb::arg("file"),
             nb::arg("max_bytes"))
        .def_prop_ro("slowest", &Ring::slowest)
        .def(
            "put",
            [](Ring& self, const nb::bytes& message, double patience_s) {
                const std::span<const std::byte> bytes{
                    static_cast<const std::byte*>(message.data()), message.size()};
                const nb::gil_scoped_release release;
                return self.put(bytes, patience_s);
            },
            nb::arg("message"), nb::arg("patience_s"))
        .def("take",
             [](Ring& self) { return taken(self, std::numeric_limits<double>::infinity()); })
        .def("take_within", &taken, nb::arg("patience_s"));
}

void bind_packed(nb::module_& module) {
    nb::class_<Packed>(module, "Packed")
        .def(
            "__init__",
            [](Packed* self, int64_t rows, int64_t cols, const std::string& dtype) {
                const Packed::Part all{rows, parse_packing(dtype)};
                new (self) Packed({&all, 1}, cols);
            },
            nb::arg("rows"), nb::arg("cols"), nb::arg("dtype"))
        .def(
            "__init__",
            [](Packed* self, const std::vector<std::pair<int64_t, std::string>>& parts,
               int64_t cols) { new (self) Packed(parsed_parts(parts), cols); },
            nb::arg("parts"), nb::arg("cols"))
        .def(
            "__init__",
            [](Packed* self, const std::vector<std::pair<int64_t, std::string>>& parts,
               int64_t cols, int64_t first_row, int64_t total_rows, bool of_halves) {
                new (self) Packed(parsed_parts(parts), cols, {first_row, total_rows, of_halves});
            },
            nb::arg("parts"), nb::arg("cols"), nb::kw_only(), nb::arg("first_row"),
            nb::arg("total_rows"), nb::arg("of_halves") = false)
        .def_prop_ro("total_rows", [](const Packed& self) { return self.cut().total_rows; })
        .def_prop_ro("is_cut", &Packed::is_cut)
        .def_prop_ro("of_halves", [](const Packed& self) { return self.cut().of_halves; })
        .def_prop_ro("rows", &Packed::rows)
        .def_prop_ro("cols", &Packed::cols)
        .def_prop_ro("dtype", &Packed::name)
        .def_prop_ro("nbytes", &Packed::num_bytes)
        .def(
            "pack",
            [](Packed& self, Team& team, int64_t first_row, const Bytes& data,
               const std::string& source_dtype, int64_t num_rows,
               const std::optional<Ints>& row_map) {
                const StoredType type = checked_type(source_dtype);
                const nb::gil_scoped_release release;
                self.pack(team, first_row, bytes_of(data), type, num_rows, span_of(row_map));
            },
            nb::arg("team"), nb::arg("first_row"), nb::arg("data").noconvert(),
            nb::arg("source_dtype"), nb::arg("num_rows"),
            nb::arg("row_map").noconvert().none() = nb::none())
        .def("unpack", [](const Packed& self) {
            NewArray<float, 2> result(
                {static_cast<size_t>(self.rows()), static_cast<size_t>(self.cols())});
            {
                const nb::gil_scoped_release release;
                self.unpack(result.data);
            }
            return nb::cast(result.array);
        });
    module.def("dequantize", &dequantized, nb::arg("data").noconvert(), nb::arg("source_dtype"),
               nb::arg("num_values"));
}

}  // namespace

}  // namespace octavo

NB_MODULE(_native, module) {
    octavo::bind_machine(module);
    octavo::bind_packed(module);
    octavo::bind_ranks(module);
    octavo::bind_program(module);
    octavo::bind_sampling(module);
}
