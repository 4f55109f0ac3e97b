// The module octavo_router._fast: what every request and every chunk goes through.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "router/bundle.h"
#include "router/events.h"
#include "router/json_reader.h"
#include "router/residency.h"
#include "router/route_keys.h"
#include "router/scan.h"
#include "router/tally.h"
#include "router/underway.h"
#include "router/usage.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::router {

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::str str_of(std::string_view text) { return nb::str(text.data(), text.size()); }

// Bytes, or whatever else shows its memory; as long as this lives.
class Buffer {
  public:
    explicit Buffer(nb::handle source) {
        if (PyBytes_Check(source.ptr())) {
            view_ = {PyBytes_AS_STRING(source.ptr()),
                     static_cast<size_t>(PyBytes_GET_SIZE(source.ptr()))};
            return;
        }
        if (PyObject_GetBuffer(source.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
        view_ = {static_cast<const char*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&buffer_); }  // does nothing where there is none

    std::string_view view() const { return view_; }

  private:
    Py_buffer buffer_{};
    std::string_view view_;
};

[[noreturn]] void raise_scan_error(const ScanFailure& failure) {
    // A message may quote a key of the body, which is valid UTF-8 by then.
    const nb::object type = nb::module_::import_("octavo_router.residency.api").attr("ScanError");
    const nb::object error = type(failure.what(), failure.offset);
    PyErr_SetObject(type.ptr(), error.ptr());
    throw nb::python_error();
}

Scan scan_body(nb::handle body, int kind, const nb::object& adapters) {
    if (kind < 0 || kind > static_cast<int>(BodyKind::responses)) {
        throw nb::value_error("kind must be CHAT, COMPLETION, OTHER, MESSAGES or RESPONSES");
    }
    const Buffer buffer(body);
    AdapterOf adapter_of;
    if (!adapters.is_none()) {
        adapter_of = [&adapters](const std::string& model) {
            return nb::cast<std::string>(adapters.attr("get")(str_of(model), ""));
        };
    }
    try {
        return scan(buffer.view(), static_cast<BodyKind>(kind), adapter_of);
    } catch (const ScanFailure& failure) {
        raise_scan_error(failure);
    }
}

nb::tuple split(const nb::bytes& data) {
    const SplitEvents events = split_token_lines(view_of(data));
    nb::list lines;
    for (const TokenLine& line : events.lines) {
        nb::list ids;
        for (const uint32_t id : line.token_ids) {
            ids.append(id);
        }
        lines.append(nb::make_tuple(line.answer, ids));
    }
    const nb::bytes clean = events.is_clean ? data : bytes_of(events.clean);
    const nb::object begin = events.begin ? nb::object(bytes_of(*events.begin)) : nb::none();
    return nb::make_tuple(clean, lines, begin);
}

nb::list match(ResidencyIndex& index, const nb::bytes& keys, const nb::sequence& slots) {
    constexpr size_t kUsual = 64;
    const size_t count = nb::len(slots);
    int64_t few_slots[kUsual];
    uint32_t few_tokens[kUsual];
    std::vector<int64_t> many_slots(count > kUsual ? count : 0);
    std::vector<uint32_t> many_tokens(count > kUsual ? count : 0);
    const std::span numbers(count > kUsual ? many_slots.data() : few_slots, count);
    const std::span tokens(count > kUsual ? many_tokens.data() : few_tokens, count);
    size_t i = 0;
    for (const nb::handle slot : slots) {
        numbers[i++] = nb::cast<int64_t>(slot);
    }
    index.match(view_of(keys), numbers, tokens);
    nb::list result;
    for (const uint32_t number : tokens) {
        result.append(number);
    }
    return result;
}

std::vector<double> numbers_of(nb::handle source) {
    std::vector<double> numbers;
    numbers.reserve(nb::len(source));
    for (const nb::handle number : source) {
        const double value = PyFloat_AsDouble(number.ptr());
        if (value == -1.0 && PyErr_Occurred() != nullptr) {
            throw nb::python_error();
        }
        numbers.push_back(value);
    }
    return numbers;
}

double tally_all(const nb::tuple& bounds, const nb::list& values, nb::list counts) {
    const std::vector<double> limits = numbers_of(bounds);
    const std::vector<double> numbers = numbers_of(values);
    if (nb::len(counts) != limits.size() + 1) {
        throw nb::value_error("counts must have one more place than bounds");
    }
    std::vector<int64_t> more(limits.size() + 1);
    const double sum = tally(limits, numbers, more);
    for (size_t i = 0; i < more.size(); ++i) {
        if (more[i] != 0) {
            counts[i] = nb::int_(nb::cast<int64_t>(nb::object(counts[i])) + more[i]);
        }
    }
    return sum;
}

Names read_names(nb::handle names) {
    Names read;
    for (const nb::handle name : names) {
        uint64_t key;
        if (read.is_full() || !PyBytes_Check(name.ptr()) ||
            PyBytes_GET_SIZE(name.ptr()) != sizeof key) {
            throw nb::value_error("names are at most 32 keys of 8 bytes");
        }
        std::memcpy(&key, PyBytes_AS_STRING(name.ptr()), sizeof key);
        read.push(key);
    }
    return read;
}

void credit(const Underway& underway, const nb::sequence& names, const nb::bytes& keys,
            const nb::sequence& endpoints, nb::list matched, double tokens_per_key) {
    std::vector<Underway::Endpoint> addresses;
    std::vector<int64_t> tokens;
    for (const nb::handle endpoint : endpoints) {
        addresses.push_back(endpoint.ptr());
    }
    for (const nb::handle number : matched) {
        tokens.push_back(nb::cast<int64_t>(number));
    }
    if (tokens.size() != addresses.size()) {
        throw nb::value_error("matched must have one number for each endpoint");
    }
    const std::vector<int64_t> before = tokens;
    const Names read = read_names(names);
    if (!read.all().empty()) {
        underway.credit(read.all(), view_of(keys), addresses, tokens, tokens_per_key);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] != before[i]) {
            matched[i] = nb::int_(tokens[i]);
        }
    }
}

void bind_scan(nb::module_& module) {
    nb::class_<Scan>(module, "Scan")
        .def_prop_ro("model", [](const Scan& scan) { return str_of(scan.model); })
        .def_ro("model_start", &Scan::model_start)
        .def_ro("model_end", &Scan::model_end)
        .def_ro("stream", &Scan::stream)
        .def_ro("include_usage", &Scan::include_usage)
        .def_ro("max_tokens", &Scan::max_tokens)
        .def_ro("num_answers", &Scan::num_answers)
        .def_ro("num_prompts", &Scan::num_prompts)
        .def_ro("priority", &Scan::priority)
        .def_prop_ro("user", [](const Scan& scan) { return str_of(scan.user); })
        .def_prop_ro("cache_salt", [](const Scan& scan) { return str_of(scan.cache_salt); })
        .def_prop_ro("session", [](const Scan& scan) { return str_of(scan.session); })
        .def_ro("prompt_bytes", &Scan::prompt_bytes)
        .def_ro("num_prompt_ids", &Scan::num_prompt_ids)
        .def_prop_ro("keys", [](const Scan& scan) { return bytes_of(scan.keys); })
        .def_ro("is_privileged", &Scan::is_privileged);
    module.def("scan", &scan_body, nb::arg(), nb::arg(), nb::arg() = nb::none());
}

void bind_index(nb::module_& module) {
    nb::class_<ResidencyIndex>(module, "ResidencyIndex")
        .def(nb::init<size_t, size_t>(), nb::kw_only(), "max_keys_per_slot"_a = kMaxKeys,
             "max_assumed_keys_per_slot"_a = kMaxAssumedKeys)
        .def("add_slot", &ResidencyIndex::add_slot)
        .def("drop_slot", &ResidencyIndex::drop_slot)
        .def("apply",
             [](ResidencyIndex& index, int64_t slot, const nb::bytes& stored,
                const nb::bytes& evicted) { index.apply(slot, view_of(stored), view_of(evicted)); })
        .def("clear", &ResidencyIndex::clear)
        .def("assume",
             [](ResidencyIndex& index, int64_t slot, const nb::bytes& keys, double tokens_per_key) {
                 index.assume(slot, view_of(keys), tokens_per_key);
             })
        .def("match", &match)
        .def("num_keys", &ResidencyIndex::num_keys)
        .def_prop_ro("memory_bytes", &ResidencyIndex::memory_bytes)
        .def_prop_ro("num_refused", &ResidencyIndex::num_refused);
}

void bind_underway(nb::module_& module) {
    nb::class_<Underway>(module, "Underway")
        .def(nb::init<>())
        .def_prop_ro("num_computing", &Underway::num_computing)
        .def("begin", [](Underway& underway,
                         const nb::sequence& names) { underway.begin(read_names(names).all()); })
        .def("end", [](Underway& underway,
                       const nb::sequence& names) { underway.end(read_names(names).all()); })
        .def("compute",
             [](Underway& underway, const nb::sequence& names, const nb::bytes& keys,
                nb::handle endpoint) {
                 underway.compute(read_names(names).all(),
                                  std::make_shared<const std::string>(view_of(keys)),
                                  endpoint.ptr());
             })
        .def("computed",
             [](Underway& underway, const nb::sequence& names, nb::handle endpoint) {
                 underway.computed(read_names(names).all(), endpoint.ptr());
             })
        .def("sharers",
             [](const Underway& underway, const nb::bytes& name) {
                 return underway.sharers(read_names(nb::make_tuple(name)).all().front());
             })
        .def("credit", &credit);
}

}  // namespace

}  // namespace octavo::router

NB_MODULE(_fast, module) {
    using namespace octavo::router;
    // The index lives as long as the process, by design: the router freezes the collector after its
    // start, so that objects in cycles (all of its parts) are never torn down at exit.
    nb::set_leak_warnings(false);
    module.attr("ROUTE_KEYS_VERSION") = bytes_of(kRouteKeysVersion);
    bind_scan(module);
    bind_index(module);
    bind_underway(module);
    bind_bundle(module);
    module.def("split_token_lines", &split);
    module.def("tally", &tally_all);
    module.def("find_usage", [](const nb::bytes& answer) {
        const Usage usage = find_usage(view_of(answer));
        const nb::object cached =
            usage.cached_tokens ? nb::object(nb::int_(*usage.cached_tokens)) : nb::none();
        return nb::make_tuple(usage.prompt_tokens, usage.output_tokens, cached);
    });
    module.def(
        "find_event_end",
        [](nb::handle buffer, size_t start) {
            const Buffer bytes(buffer);
            return find_event_end(bytes.view(), start);
        },
        nb::arg(), nb::arg() = 0);
}
