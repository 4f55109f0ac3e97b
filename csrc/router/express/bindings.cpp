#include "router/express/bindings.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "router/express/lane.h"

namespace octavo::router {

namespace {

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

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

nb::tuple write_names(const Names& names) {
    nb::list keys;
    for (const uint64_t name : names.all()) {
        keys.append(nb::bytes(reinterpret_cast<const char*>(&name), sizeof name));
    }
    return nb::tuple(keys);
}

void credit(const Underway& underway, const nb::sequence& names, const nb::bytes& keys,
            const nb::sequence& endpoints, nb::list matched, double tokens_per_key) {
    std::vector<Underway::Endpoint> addresses;
    std::vector<int64_t> tokens;
    for (const nb::handle endpoint : endpoints) {
        addresses.push_back(endpoint.ptr());
    }
    for (const nb::handle number : matched) {
        tokens.push_back(to_int(number.ptr()));
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
            matched[i] = from_int(tokens[i]);
        }
    }
}

Flight& flight_of(nb::handle self) { return *nb::inst_ptr<Flight>(self); }

nb::object exchange_of(nb::handle self) { return flight_of(self).lane->exchange_of(self); }

void on_whole(nb::handle self, nb::handle head, nb::handle body) {
    flight_of(self).lane->on_whole(self, head, body);
}

// A call that the exchange answers: the flight ends with it.
template <typename... Arguments>
auto passed_on(const char* name) {
    return [name](nb::handle self, Arguments... arguments) {
        return exchange_of(self).attr(name)(arguments...);
    };
}

// A large answer fills the transport while it is written; there is nothing left to stop then.
void client_paused(nb::handle self) {
    if (!flight_of(self).is_landing) {
        exchange_of(self).attr("client_paused")();
    }
}

// Before the answer there is nothing that a client would ignore.
nb::bytes no_probe(nb::handle) { return nb::bytes("", 0); }

}  // namespace

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

void bind_express(nb::module_& module) {
    nb::class_<Flight>(module, "Flight")
        .def_ro("connection", &Flight::connection)
        .def_ro("head", &Flight::head)
        .def_ro("body", &Flight::body)
        .def_ro("path", &Flight::path)
        .def_ro("record", &Flight::record)
        .def_ro("tenant", &Flight::tenant)
        .def_ro("route", &Flight::route)
        .def_ro("endpoint", &Flight::endpoint)
        .def_ro("lines", &Flight::lines)
        .def_ro("upstream", &Flight::upstream)
        .def_ro("policy", &Flight::policy)
        .def_ro("reason", &Flight::reason)
        .def_ro("scan", &Flight::scan)
        .def_prop_ro("keys",
                     [](const Flight& flight) {
                         return nb::bytes(flight.keys->data(), flight.keys->size());
                     })
        .def_prop_ro("names", [](const Flight& flight) { return write_names(flight.names); })
        .def_ro("prompt_tokens", &Flight::prompt_tokens)
        .def_ro("matched_tokens", &Flight::matched_tokens)
        .def_ro("uncached_tokens", &Flight::uncached_tokens)
        .def_ro("generation", &Flight::generation)
        .def_ro("is_computing", &Flight::is_computing)
        .def_ro("asks_tokens", &Flight::asks_tokens)
        .def_ro("is_over", &Flight::is_over)
        .def_ro("began_at", &Flight::began_at)
        .def_ro("attempt_at", &Flight::attempt_at)
        .def_ro("total_at", &Flight::total_at)
        // as the user of an engine's connection
        .def("on_connected", passed_on<nb::handle>("on_connected"))
        .def("on_whole", &on_whole)
        .def("on_head", passed_on<nb::handle>("on_head"))
        .def("on_body", passed_on<nb::handle>("on_body"))
        .def("on_end", passed_on<>("on_end"))
        .def("on_lost", passed_on<nb::handle, nb::handle>("on_lost"))
        // as the owner of a client's connection
        .def("client_gone", passed_on<>("client_gone"))
        .def("client_paused", &client_paused)
        .def("client_resumed", passed_on<>("client_resumed"))
        .def("client_too_slow", passed_on<>("client_too_slow"))
        .def("probe", &no_probe)
        .def("on_deadline", passed_on<nb::handle>("on_deadline"))
        .def("shut_down", passed_on<nb::handle>("shut_down"));
    nb::class_<Taker>(module, "Taker");
    nb::class_<Lane, Taker>(module, "Lane")
        .def(nb::init<nb::handle, nb::handle, nb::handle>())
        .def_prop_ro("num_flights", &Lane::num_flights)
        .def("begin", &Lane::begin)
        .def("take", [](Lane& lane, nb::handle protocol, const nb::bytes& data) {
            return lane.take(protocol, view_of(data));
        });
}

}  // namespace octavo::router
