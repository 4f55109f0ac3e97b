// What a socket has received, before its protocol would get it: whole requests and answers of the
// usual kind go straight to the lane. All else is left to ClientConnection and UpstreamConnection.
#include "router/express/lane.h"
#include "router/express/texts.h"

namespace octavo::router {

namespace {

constexpr std::string_view kEndOfHead = "\r\n\r\n";

}  // namespace

bool Lane::take(nb::handle protocol, std::string_view data) {
    if (shapes_.client.fits(protocol.ptr())) {
        return take_request(protocol, data);
    }
    return shapes_.connection.fits(protocol.ptr()) && take_answer(protocol.ptr(), data);
}

// ClientConnection.data_received of one whole request with the same head as the last one.
bool Lane::take_request(nb::handle connection, std::string_view data) {
    const ClientShape& client = shapes_.client;
    PyObject* self = connection.ptr();
    const std::string_view memo = bytes_view(client.memo.get(self));
    if (client.state.as_int(self) != head_state_ || data.empty() ||
        static_cast<int64_t>(data.size()) != client.memo_size.as_int(self) ||
        !data.starts_with(memo) || PyBytes_GET_SIZE(client.buffer.get(self)) != 0 ||
        client.is_paused.is_true(self) ||
        shapes_.shared.service.get(client.shared.get(self)) != proxy_.ptr()) {
        return false;
    }
    const nb::object head = nb::borrow(client.memo_head.get(self));
    if (!shapes_.head.fits(head.ptr())) {
        return false;
    }
    PyObject* facts = shapes_.head.facts.get(head.ptr());
    if (!shapes_.facts.fits(facts) ||
        shapes_.facts.reader.get(facts) != shapes_.proxy.facts.get(proxy_.ptr())) {
        return false;
    }
    if (shapes_.facts.needs_key.is_true(facts)) {
        nb::object tenant = tenant_of(head.ptr(), facts);
        if (!tenant.is_valid()) {
            return false;
        }
        client.context.set(self, std::move(tenant));
    }
    client.head.set(self, head);
    client.state.set(self, from_int(busy_state_));
    client.deadline.set(self, never_);
    const std::string_view text = data.substr(memo.size());
    const nb::object body =
        owned(PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
    const nb::object begun = begin(connection, head, body);
    if (begun.ptr() != Py_True) {
        hand_over_.call(connection, head, body, begun.ptr() == Py_False ? nb::none() : begun);
    }
    return true;
}

// gate.authenticate. Nothing where it refuses: it is asked again, by who says so.
nb::object Lane::tenant_of(PyObject* head, PyObject* facts) const {
    PyObject* authenticate = shapes_.gate.authenticate.get(gate_.ptr());
    PyObject* hint = shapes_.facts.tenant_hint.get(facts);
    if (PyMethod_Check(authenticate) && PyMethod_GET_FUNCTION(authenticate) == by_keys_.ptr()) {
        PyObject* tenants = PyMethod_GET_SELF(authenticate);
        if (shapes_.tenants.fits(tenants) &&
            !shapes_.key_table.is_required.is_true(shapes_.tenants.table.get(tenants))) {
            PyObject* known = look_up(shapes_.tenants.anonymous.get(tenants), hint);
            if (known != nullptr) {
                return nb::borrow(known);
            }
        }
    }
    PyObject* arguments[] = {shapes_.head.credentials.get(head), hint};
    PyObject* tenant = PyObject_Vectorcall(authenticate, arguments, std::size(arguments), nullptr);
    if (tenant == nullptr) {
        PyErr_Clear();
    }
    return nb::steal(tenant);
}

// UpstreamConnection.data_received of one whole answer to a flight, with a head that is known.
bool Lane::take_answer(PyObject* connection, std::string_view data) {
    const UpstreamConnectionShape& shape = shapes_.connection;
    const nb::object user = nb::borrow(shape.user.get(connection));
    if (!is_flight(user) || shape.state.as_int(connection) != awaiting_state_ ||
        PyBytes_GET_SIZE(shape.buffer.get(connection)) != 0 ||
        has_unsent(shape.transport.get(connection))) {
        return false;
    }
    const size_t end = data.find(kEndOfHead);
    if (end == std::string_view::npos) {
        return false;
    }
    const nb::object fields =
        owned(PyBytes_FromStringAndSize(data.data(), static_cast<Py_ssize_t>(end)));
    const nb::object known = known_.get(nb::handle(shape.parser.get(connection)));
    const nb::object head = nb::borrow(look_up(known, fields));
    const std::string_view text = data.substr(end + kEndOfHead.size());
    if (!head.is_valid() || !shapes_.answer.fits(head.ptr()) ||
        shapes_.answer.status.as_int(head.ptr()) < 200 ||
        !shapes_.answer.keep_alive.is_true(head.ptr()) ||
        shapes_.answer.content_length.is_none(head.ptr()) ||
        shapes_.answer.content_length.as_int(head.ptr()) != static_cast<int64_t>(text.size())) {
        return false;
    }
    const nb::object body =
        owned(PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
    shape.user.set(connection, nb::none());
    shape.state.set(connection, from_int(idle_state_));
    give_back(connection);
    on_whole(user, head, body);
    return true;
}

// UpstreamPool.give_back.
void Lane::give_back(PyObject* connection) {
    const UpstreamPoolShape& shape = shapes_.pool;
    PyObject* pool = shapes_.connection.pool.get(connection);
    PyObject* idle = shape.idle.get(pool);
    const Py_ssize_t count = PyList_GET_SIZE(idle);
    if (!shape.fits(pool) || shape.is_closed.is_true(pool) || count >= max_idle_) {
        give_back_.call(nb::handle(pool), nb::handle(connection));
        return;
    }
    const double since = now();
    shapes_.connection.idle_since.set(connection, from_double(since));
    if (count == 0) {
        shape.deadline.set(pool, from_double(since + shape.idle_s.as_double(pool)));
    }
    if (PyList_Append(idle, connection) != 0) {
        throw nb::python_error();
    }
}

}  // namespace octavo::router
