// From an engine's answer to the client, and giving back what the request held.
#include <exception>

#include "router/express/lane.h"
#include "router/express/texts.h"
#include "router/usage.h"

using namespace nanobind::literals;

namespace octavo::router {

namespace {

constexpr std::string_view kRequestId = "x-request-id: ";
constexpr std::string_view kOk = "HTTP/1.1 200 OK\r\n";
constexpr std::string_view kLengthOfAnswer = "content-length: ";
constexpr std::string_view kEndOfHead = "\r\n\r\n";

}  // namespace

nb::object Lane::exchange_of(nb::handle self) const {
    Flight& flight = *nb::inst_ptr<Flight>(self);
    if (!flight.successor.is_valid()) {
        flight.successor = take_over_(self);
    }
    return flight.successor;
}

void Lane::on_whole(nb::handle self, nb::handle head, nb::handle body) {
    Flight& flight = *nb::inst_ptr<Flight>(self);
    try {
        if (!flight.successor.is_valid() && land(self, flight, head, body)) {
            return;
        }
    } catch (nb::python_error& error) {
        broke_(self, error.value());
        return;
    } catch (const std::exception& error) {
        const nb::object type = nb::borrow(PyExc_RuntimeError);
        broke_(self, type(error.what()));
        return;
    }
    exchange_of(self).attr("on_whole")(head, body);
}

bool Lane::land(nb::handle self, Flight& flight, nb::handle head, nb::handle body) {
    PyObject* connection = flight.connection.ptr();
    const ClientShape& client = shapes_.client;
    PyObject* shared = client.shared.get(connection);
    const bool is_plain =
        !flight.scan.stream && shapes_.answer.fits(head.ptr()) && PyBytes_CheckExact(body.ptr()) &&
        shapes_.answer.status.as_int(head.ptr()) == 200 &&
        (!shapes_.path.generates.is_true(flight.path.ptr()) ||
         (shapes_.answer.is_json.is_true(head.ptr()) && PyBytes_GET_SIZE(body.ptr()) != 0)) &&
        shapes_.head.keep_alive.is_true(flight.head.ptr()) &&
        !shapes_.head.is_http10.is_true(flight.head.ptr()) &&
        !shapes_.shared.is_closing.is_true(shared) && !client.is_half_closed.is_true(connection);
    if (!is_plain) {
        return false;
    }
    const nb::object answer = answer_bytes(flight, head, body);
    flight.upstream = nb::none();  // it has gone back already
    flight.is_landing = true;
    write(client.transport.get(connection), answer, client.write.get(connection));
    const double ended_at = now();
    flight.is_over = true;

    const Usage usage = find_usage(bytes_view(body.ptr()));
    const RecordShape& shape = shapes_.record;
    PyObject* record = flight.record.ptr();
    const bool is_told = usage.prompt_tokens != 0 || usage.output_tokens != 0;
    if (is_told) {
        shape.prompt_tokens.set(record, from_int(usage.prompt_tokens));
        shape.output_tokens.set(record, from_int(usage.output_tokens));
        if (usage.cached_tokens) {
            shape.cached_tokens.set(record, from_int(*usage.cached_tokens));
        }
    }
    const nb::object total_s = from_double(ended_at - flight.began_at);
    shape.status.set(record, two_hundred_);
    shape.response_bytes.set(record, from_int(PyBytes_GET_SIZE(body.ptr())));
    shape.ttft_s.set(record, total_s);
    shape.last_token_s.set(record, total_s);
    shape.duration_s.set(record, total_s);
    shape.ended_at.set(record, from_double(ended_at));
    shape.outcome.set(record, ok_);

    finish_lease(flight, ended_at, usage);
    if (look_up(watched_, flight.key) != Py_True) {
        put(watched_, flight.key, nb::handle(Py_True));
    }
    shapes_.tenant.in_flight.add(flight.tenant.ptr(), int64_t{-1});
    if (PySet_Discard(exchanges_.ptr(), self.ptr()) < 0) {
        throw nb::python_error();
    }
    shapes_.budget.num_active.add(budget_.ptr(), int64_t{-1});
    count(record);
    if (!access_log_.is_none() && takes_all_.get(access_log_).ptr() == Py_True) {
        write_.call(access_log_, flight.record);
    }
    finish_connection(flight, ended_at);
    return true;
}

nb::object Lane::answer_bytes(const Flight& flight, nb::handle head, nb::handle body) const {
    const Digits length(bytes_view(body.ptr()).size());
    return join({
        kOk,
        kRequestId,
        text_view(shapes_.record.request_id.get(flight.record.ptr())),
        bytes_view(shapes_.lines.served_by.get(flight.lines.ptr())),
        bytes_view(shapes_.answer.forward.get(head.ptr())),
        kLengthOfAnswer,
        length.view(),
        kEndOfHead,
        bytes_view(body.ptr()),
    });
}

// Lease.finish, and what dispatcher, health, metrics and throttle make of it.
void Lane::finish_lease(const Flight& flight, double now, const Usage& usage) {
    const int64_t prompt_tokens = usage.prompt_tokens;
    PyObject* endpoint = flight.endpoint.ptr();
    PyObject* pool = shapes_.route.pool.get(flight.route.ptr());
    placing_.release(endpoint, flight.uncached_tokens, flight.generation);
    const std::string& keys = *flight.keys;
    if (!keys.empty()) {
        const std::span<const uint64_t> names = flight.names.all();
        if (flight.is_computing) {
            placing_.underway().computed(names, endpoint);
        }
        const int64_t slot = shapes_.endpoint.slot.as_int(endpoint);
        if (slot >= 0 &&
            PyUnicode_CompareWithASCIIString(shapes_.endpoint.kind.get(endpoint), "openai") == 0) {
            // It tells nothing of its cache: remember what it has just seen.
            const double tokens_per_key =
                static_cast<double>(8 * flight.prompt_tokens) / static_cast<double>(keys.size());
            placing_.index().assume(slot, keys, tokens_per_key);
        }
        placing_.underway().end(names);
    }
    const auto num_bytes = static_cast<int64_t>(flight.scan.prompt_bytes);
    if (prompt_tokens > 0 && num_bytes >= min_rate_bytes_) {
        const double seen = prompt_tokens < num_bytes ? static_cast<double>(prompt_tokens) /
                                                            static_cast<double>(num_bytes)
                                                      : 1.0;
        PyObject* known = look_up(rates_, pool);
        const double rate = known == nullptr ? seen : to_double(known);
        put(rates_, pool,
            from_double(known == nullptr ? seen : rate + rate_weight_ * (seen - rate)));
    }
    if (!health_.is_none()) {
        note_health(flight, now, usage);
    }
    if (!observer_.is_none()) {
        count_one(shapes_.observer.ends.get(observer_.ptr()),
                  owned(PyTuple_Pack(3, endpoint, pool, ok_.ptr())));
    }
    if (!throttle_.is_none()) {
        PyObject* window = look_up(shapes_.throttle.pools.get(throttle_.ptr()), pool);
        if (window == nullptr) {
            note_.call(throttle_, nb::handle(pool), result_ok_);
        } else {
            count_window(window, now, 1.0);
        }
    }
    if (PyDict_GET_SIZE(queues_.ptr()) != 0) {
        wake_.call(gate_, nb::handle(pool));
    }
}

// health.note of a good answer.
void Lane::note_health(const Flight& flight, double now, const Usage& usage) {
    PyObject* id = shapes_.spec.id.get(shapes_.endpoint.spec.get(flight.endpoint.ptr()));
    if (look_up(shapes_.registry.endpoints.get(registry_.ptr()), id) != flight.endpoint.ptr()) {
        return;  // a late end; what was forgotten stays so
    }
    PyObject* found = look_up(shapes_.health.records.get(health_.ptr()), id);
    const nb::object record =
        found != nullptr ? nb::borrow(found) : make_record_.call(health_, flight.endpoint);
    const nb::object at = from_double(now);
    const nb::object work =
        from_int(usage.prompt_tokens - usage.cached_tokens.value_or(0) + usage.output_tokens);
    shapes_.health_record.last_at.set(record.ptr(), at);
    append_.call(nb::borrow(shapes_.health_record.samples.get(record.ptr())),
                 owned(PyTuple_Pack(4, at.ptr(), zero_.ptr(), Py_None, work.ptr())));
    shapes_.health_record.num_failures.set(record.ptr(), zero_);
    shapes_.health_record.num_errors.set(record.ptr(), zero_);
}

// ClientConnection.finish of one that stays open; what comes next begins.
void Lane::finish_connection(const Flight& flight, double now) const {
    PyObject* connection = flight.connection.ptr();
    const ClientShape& client = shapes_.client;
    if (client.state.as_int(connection) != busy_state_ || client.is_paused.is_true(connection) ||
        PyBytes_GET_SIZE(client.buffer.get(connection)) != 0) {
        nb::handle(connection).attr("finish")("keep_alive"_a = true);
        return;
    }
    client.owner.set(connection, nb::none());
    client.has_begun.set(connection, from_bool(false));
    client.context.set(connection, nb::none());
    client.state.set(connection, from_int(head_state_));
    PyObject* timeouts = shapes_.shared.timeouts.get(client.shared.get(connection));
    client.deadline.set(connection, from_double(now + shapes_.timeouts.idle_s.as_double(timeouts)));
}

}  // namespace octavo::router
