#include "router/express/lane.h"

#include <ctime>

#include "router/express/texts.h"
#ifdef OCTAVO_HAS_EPOLL
#include "router/sockets/transport.h"
#endif

namespace octavo::router {

Lane::Lane(nb::handle proxy, nb::handle take_over, nb::handle broke)
    : proxy_(nb::borrow(proxy)),
      take_over_(nb::borrow(take_over)),
      broke_(nb::borrow(broke)),
      clock_(from("time", "monotonic")),
      registry_(proxy.attr("_registry")),
      dispatcher_(proxy.attr("dispatcher")),
      gate_(proxy.attr("_gate")),
      models_(proxy.attr("_models")),
      budget_(proxy.attr("budget")),
      upstreams_(proxy.attr("upstreams")),
      metrics_(proxy.attr("_metrics")),
      access_log_(proxy.attr("_access_log")),
      observer_(dispatcher_.attr("observer")),
      health_(dispatcher_.attr("health")),
      throttle_(gate_.attr("throttle")),
      quarantine_(proxy.attr("quarantine")),
      exchanges_(proxy.attr("exchanges")),
      queues_(gate_.attr("_queues")),
      candidates_(registry_.attr("_candidates")),
      by_id_(upstreams_.attr("_by_id")),
      tenants_(budget_.attr("_tenants")),
      rates_(dispatcher_.attr("token_rates").attr("_rates")),
      watched_(quarantine_.attr("watched")),
      template_(shapes_.record.type()),
      placing_(shapes_, dispatcher_, gate_.attr("_rooms")),
      head_state_(nb::cast<int64_t>(from("octavo_router.http.client_connection", "HEAD"))),
      busy_state_(nb::cast<int64_t>(from("octavo_router.http.client_connection", "BUSY"))),
      idle_state_(nb::cast<int64_t>(from("octavo_router.http.upstream_connection", "IDLE"))),
      awaiting_state_(
          nb::cast<int64_t>(from("octavo_router.http.upstream_connection", "AWAITING"))),
      max_idle_(nb::cast<int64_t>(from("octavo_router.http.upstream_pool", "MAX_IDLE"))),
      min_underway_tokens_(
          nb::cast<int64_t>(from("octavo_router.routing.dispatcher", "MIN_UNDERWAY_TOKENS"))),
      min_rate_bytes_(nb::cast<int64_t>(from("octavo_router.routing.estimate", "MIN_BYTES"))),
      max_watched_(nb::cast<int64_t>(from("octavo_router.flow.quarantine", "MAX_WATCHED"))),
      tokens_per_byte_(nb::cast<double>(from("octavo_router.routing.estimate", "TOKENS_PER_BYTE"))),
      rate_weight_(nb::cast<double>(from("octavo_router.routing.estimate", "WEIGHT"))),
      chunk_bytes_(nb::cast<double>(from("octavo_router.routing.estimate", "CHUNK_BYTES"))),
      ok_(text_of("ok")),
      result_ok_(from("octavo_router.routing.outcome", "AttemptResult").attr("OK")),
      zero_(from_int(0)),
      one_(from_int(1)),
      two_hundred_(from_int(200)),
      never_(from("octavo_router.http.deadlines", "NEVER")),
      flight_type_(nb::borrow(nb::type<Flight>())),
      policy_name_(shapes_.prefix_load.type.attr("name")),
      by_keys_(shapes_.tenants.type.attr("authenticate")),
      stream_tokens_(from("octavo_router.proxy.heads", "STREAM_TOKENS")),
      is_system_clock_(PyCFunction_Check(clock_.ptr())),
      bundle_(nb::cast<Py_ssize_t>(from("octavo_router.metrics.router_metrics", "BUNDLE"))) {
#ifdef OCTAVO_HAS_EPOLL
    transport_type_ = nb::borrow(nb::type<Transport>());
#endif
    for (const nb::handle name : shapes_.record.type.attr("__slots__")) {
        record_slots_.emplace_back(shapes_.record.type, nb::cast<nb::str>(name).c_str());
    }
}

// time.monotonic, to the bit.
double Lane::now() const {
#ifdef __linux__
    if (is_system_clock_) {
        timespec time{};
        ::clock_gettime(CLOCK_MONOTONIC, &time);
        const int64_t ns = int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
        return static_cast<double>(ns) / 1e9;
    }
#endif
    return to_double(owned(PyObject_CallNoArgs(clock_.ptr())).ptr());
}

// What is current was learnt from the registry as it is.
bool Lane::is_current(PyObject* version) const {
    return to_int(version) == shapes_.registry.version.as_int(registry_.ptr());
}

// transport.write. `method`: that of a connection's, where it keeps one.
void Lane::write(PyObject* transport, nb::handle data, PyObject* method) const {
#ifdef OCTAVO_HAS_EPOLL
    if (Py_TYPE(transport) == reinterpret_cast<PyTypeObject*>(transport_type_.ptr())) {
        nb::inst_ptr<Transport>(transport)->write(data);
        return;
    }
#endif
    if (method != nullptr) {
        owned(PyObject_CallOneArg(method, data.ptr()));
    } else {
        write_.call(nb::handle(transport), data);
    }
}

// transport.is_closing.
bool Lane::is_closing(PyObject* transport) const {
#ifdef OCTAVO_HAS_EPOLL
    if (Py_TYPE(transport) == reinterpret_cast<PyTypeObject*>(transport_type_.ptr())) {
        return nb::inst_ptr<Transport>(transport)->is_closing();
    }
#endif
    return is_closing_.call(nb::handle(transport)).ptr() == Py_True;
}

// transport.get_write_buffer_size: whether a part of what was written is still here.
bool Lane::has_unsent(PyObject* transport) const {
#ifdef OCTAVO_HAS_EPOLL
    if (Py_TYPE(transport) == reinterpret_cast<PyTypeObject*>(transport_type_.ptr())) {
        return nb::inst_ptr<Transport>(transport)->num_unsent() != 0;
    }
#endif
    return to_int(num_unsent_.call(nb::handle(transport)).ptr()) != 0;
}

// metrics.finish of a record that has its end.
void Lane::count(PyObject* record) const {
    PyObject* over = shapes_.metrics.over.get(metrics_.ptr());
    if (PyList_Append(over, record) != 0) {
        throw nb::python_error();
    }
    if (PyList_GET_SIZE(over) >= bundle_) {
        fold_.call(metrics_);
    }
}

double Lane::rate_of(nb::handle pool) const {
    PyObject* rate = look_up(rates_, pool);
    return rate == nullptr ? tokens_per_byte_ : to_double(rate);
}

// quarantine.key_of.
nb::object Lane::key_of(PyObject* pool, PyObject* path, nb::handle body) const {
    const nb::object all = owned(PyTuple_Pack(3, pool, path, body.ptr()));
    const Py_hash_t key = PyObject_Hash(all.ptr());
    if (key == -1) {
        throw nb::python_error();
    }
    return from_int(key);
}

// Windowed.count.
void Lane::count_window(PyObject* window, double now, double second) const {
    if (now >= shapes_.window.until.as_double(window)) {
        count_.call(window, from_double(now), from_double(second));
        return;
    }
    shapes_.window.first.add(window, 1.0);
    shapes_.window.second.add(window, second);
}

}  // namespace octavo::router
