#include "router/express/lane.h"

#include "router/express/texts.h"

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
      exchanges_(proxy.attr("exchanges")),
      queues_(gate_.attr("_queues")),
      candidates_(registry_.attr("_candidates")),
      by_id_(upstreams_.attr("_by_id")),
      tenants_(budget_.attr("_tenants")),
      rates_(dispatcher_.attr("token_rates").attr("_rates")),
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
      tokens_per_byte_(nb::cast<double>(from("octavo_router.routing.estimate", "TOKENS_PER_BYTE"))),
      rate_weight_(nb::cast<double>(from("octavo_router.routing.estimate", "WEIGHT"))),
      chunk_bytes_(nb::cast<double>(from("octavo_router.routing.estimate", "CHUNK_BYTES"))),
      ok_(text_of("ok")),
      result_ok_(from("octavo_router.routing.outcome", "Result").attr("OK")),
      zero_(from_int(0)),
      one_(from_int(1)),
      two_hundred_(from_int(200)),
      never_(from("octavo_router.http.deadlines", "NEVER")),
      flight_type_(nb::borrow(nb::type<Flight>())) {
    for (const nb::handle name : shapes_.record.type.attr("__slots__")) {
        record_slots_.emplace_back(shapes_.record.type, nb::cast<nb::str>(name).c_str());
    }
}

double Lane::now() const { return to_double(owned(PyObject_CallNoArgs(clock_.ptr())).ptr()); }

double Lane::rate_of(nb::handle pool) const {
    PyObject* rate = look_up(rates_, pool);
    return rate == nullptr ? tokens_per_byte_ : to_double(rate);
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
