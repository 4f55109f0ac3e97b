// From a client's request to an engine's connection.
#include <algorithm>
#include <array>
#include <charconv>
#include <exception>

#include "router/express/lane.h"
#include "router/express/texts.h"
#include "router/json_reader.h"

namespace octavo::router {

namespace {

constexpr std::string_view kRequestId = "x-request-id: ";
constexpr std::string_view kLengthOfRequest = "\r\ncontent-length: ";
constexpr std::string_view kEndOfHead = "\r\n\r\n";

}  // namespace

nb::object Lane::begin(nb::handle connection, nb::handle head, nb::handle body) {
    // Up to the commitment below nothing is changed, so that the long way can begin anew.
    Facts facts{};
    if (!PyBytes_CheckExact(body.ptr()) || !read_facts(connection.ptr(), head.ptr(), facts)) {
        return from_bool(false);
    }
    const double began_at = now();
    auto flight = std::make_unique<Flight>();
    try {
        const auto kind = static_cast<BodyKind>(shapes_.path.kind.as_int(facts.path));
        flight->scan = scan(bytes_view(body.ptr()), kind, {});
    } catch (const ScanFailure&) {
        return from_bool(false);  // read again to say what is wrong with it
    }
    Scan& scan = flight->scan;
    const auto long_way = [&] { return nb::cast(std::move(scan)); };
    const nb::object model = text_of(scan.model);
    PyObject* route = route_of(model);
    if (route == nullptr || scan.is_privileged || !is_open(facts.tenant)) {
        return long_way();
    }
    PyObject* pool = shapes_.route.pool.get(route);
    flight->key = key_of(pool, shapes_.path.path.get(facts.path), body);
    PyObject* watched = look_up(watched_, flight->key);
    if (watched != nullptr && watched != Py_True) {  // another copy is under way, or was lost
        return long_way();
    }
    const nb::object key = owned(PyTuple_Pack(2, pool, shapes_.route.revision.get(route)));
    PyObject* candidates = look_up(candidates_, key);
    PyObject* window = look_up(tenants_, shapes_.tenant.name.get(facts.tenant));
    const DispatcherShape& dispatcher = shapes_.dispatcher;
    PyObject* policies = dispatcher.policies.get(dispatcher_.ptr());
    PyObject* own_policy = look_up(shapes_.policies.by_pool.get(policies), pool);
    const nb::object policy =
        nb::borrow(own_policy != nullptr ? own_policy : shapes_.policies.otherwise.get(policies));
    const int64_t num_picks = dispatcher.num_picks.as_int(dispatcher_.ptr()) + 1;
    if (candidates == nullptr || !shapes_.prefix_load.fits(policy.ptr()) ||
        num_picks % dispatcher.sample_every.as_int(dispatcher_.ptr()) == 0) {  // looked at closely
        return long_way();
    }

    const double placed_at = now();
    const double rate = rate_of(pool);
    flight->prompt_tokens =
        scan.num_prompt_ids != 0
            ? static_cast<int64_t>(scan.num_prompt_ids)
            : 1 + static_cast<int64_t>(static_cast<double>(scan.prompt_bytes) * rate);
    flight->names = names_of(scan.keys);
    const std::optional<Choice> choice = placing_.choose(
        candidates, policy, scan.keys, flight->names, flight->prompt_tokens, chunk_bytes_ * rate);
    PyObject* upstream = choice ? upstream_of(choice->endpoint, placed_at) : nullptr;
    if (upstream == nullptr) {
        return long_way();
    }

    // Committed: from here on it is under way.
    PyObject* endpoint = choice->endpoint;
    PyObject* connections = shapes_.pool.idle.get(shapes_.upstream.pool.get(upstream));
    const Py_ssize_t last = PyList_GET_SIZE(connections) - 1;
    flight->lane = this;
    flight->connection = nb::borrow(connection);
    flight->head = nb::borrow(head);
    flight->body = nb::borrow(body);
    flight->path = nb::borrow(facts.path);
    flight->tenant = nb::borrow(facts.tenant);
    flight->route = nb::borrow(route);
    flight->endpoint = nb::borrow(endpoint);
    flight->lines = nb::borrow(shapes_.upstream.lines.get(upstream));
    flight->upstream = nb::borrow(PyList_GET_ITEM(connections, last));
    flight->policy = policy_name_;
    flight->reason = choice->reason;
    flight->asks_tokens =
        scan.stream && shapes_.path.resumes.is_true(facts.path) &&
        PyUnicode_CompareWithASCIIString(shapes_.endpoint.kind.get(endpoint), "octavo") == 0;
    flight->keys = std::make_shared<const std::string>(std::move(scan.keys));
    flight->matched_tokens = choice->matched_tokens;
    flight->uncached_tokens = std::max<int64_t>(flight->prompt_tokens - choice->matched_tokens, 1);
    flight->began_at = began_at;
    flight->attempt_at = placed_at;
    PyObject* timeouts = shapes_.proxy.timeouts.get(proxy_.ptr());
    flight->total_at = began_at + shapes_.timeouts.total_s.as_double(timeouts);
    double deadline = flight->total_at;
    if (scan.stream) {  // a whole answer begins when it has ended: only the total bounds it
        const double first_token_s = shapes_.timeouts.first_token_s.as_double(timeouts) +
                                     shapes_.timeouts.first_token_per_1k_s.as_double(timeouts) *
                                         (static_cast<double>(flight->prompt_tokens) / 1000.0);
        deadline = std::min(deadline, flight->attempt_at + first_token_s);
    }
    if (PyList_SetSlice(connections, last, last + 1, nullptr) != 0) {
        throw nb::python_error();
    }

    if (watched == nullptr) {
        if (PyDict_GET_SIZE(watched_.ptr()) >= max_watched_) {
            forget_.call(quarantine_);
        }
        put(watched_, flight->key, shapes_.spec.id.get(shapes_.endpoint.spec.get(endpoint)));
    }
    ++num_flights_;
    shapes_.tenant.in_flight.add(facts.tenant, int64_t{1});
    if (window == nullptr) {  // its first one
        begin_.call(budget_, nb::handle(shapes_.tenant.name.get(facts.tenant)),
                    from_double(began_at));
    } else {
        shapes_.budget.num_active.add(budget_.ptr(), int64_t{1});
        count_window(window, began_at, 0.0);
    }
    dispatcher.num_picks.set(dispatcher_.ptr(), from_int(num_picks));
    shapes_.endpoint.last_pick.set(endpoint, from_int(num_picks));
    flight->generation = placing_.reserve(endpoint, flight->uncached_tokens);
    if (!flight->keys->empty()) {
        const std::span<const uint64_t> names = flight->names.all();
        placing_.underway().begin(names);
        if (flight->uncached_tokens >= min_underway_tokens_) {
            flight->is_computing = true;
            placing_.underway().compute(names, flight->keys, endpoint);
        }
    }
    if (!observer_.is_none()) {
        put(shapes_.observer.placed_at.get(observer_.ptr()), pool, from_double(placed_at));
        count_one(shapes_.observer.picks.get(observer_.ptr()),
                  owned(PyTuple_Pack(3, endpoint, pool, flight->policy.ptr())));
    }
    flight->record = new_record(*flight, facts, model);
    Flight& under_way = *flight;
    const nb::object self = nb::cast(flight.release(), nb::rv_policy::take_ownership);
    if (PySet_Add(exchanges_.ptr(), self.ptr()) != 0) {
        throw nb::python_error();
    }
    const ClientShape& client = shapes_.client;
    client.context.set(connection.ptr(), under_way.record);
    client.owner.set(connection.ptr(), self);
    try {
        send(under_way.upstream, self, request_bytes(under_way));
    } catch (nb::python_error& error) {
        broke_(self, error.value());
        return from_bool(true);
    } catch (const std::exception& error) {
        broke_(self, nb::borrow(PyExc_RuntimeError)(error.what()));
        return from_bool(true);
    }
    client.deadline.set(connection.ptr(), from_double(deadline));
    return from_bool(true);
}

// UpstreamConnection.send.
void Lane::send(nb::handle connection, nb::handle flight, nb::handle data) const {
    const UpstreamConnectionShape& shape = shapes_.connection;
    if (!shape.fits(connection.ptr())) {
        send_.call(connection, flight, data);
        return;
    }
    shape.user.set(connection.ptr(), nb::borrow(flight));
    shape.num_interim.set(connection.ptr(), zero_);
    shape.state.set(connection.ptr(), from_int(awaiting_state_));
    write(shape.transport.get(connection.ptr()), data, nullptr);
}

// Whether head and connection are such that a look at the body is worth while.
bool Lane::read_facts(PyObject* connection, PyObject* head, Facts& facts) const {
    if (!shapes_.client.fits(connection) || !shapes_.head.fits(head)) {
        return false;
    }
    facts.head = head;
    facts.facts = shapes_.head.facts.get(head);
    if (!shapes_.facts.fits(facts.facts)) {
        return false;
    }
    facts.path = shapes_.facts.path.get(facts.facts);
    facts.tenant = shapes_.client.context.get(connection);
    return shapes_.path.fits(facts.path) && shapes_.tenant.fits(facts.tenant) &&
           shapes_.path.is_json.is_true(facts.path) && !shapes_.path.keeps.is_true(facts.path) &&
           !shapes_.path.is_kept.is_true(facts.path) &&
           shapes_.facts.is_plain.is_true(facts.facts) &&
           is_current(shapes_.proxy.version.get(proxy_.ptr())) &&
           PyDict_GET_SIZE(shapes_.proxy.adapters.get(proxy_.ptr())) == 0;
}

// gate.admit: nobody waits, nothing is asked of the tenant, nothing is refused at once.
bool Lane::is_open(PyObject* tenant) const {
    return shapes_.tenant.is_free.is_true(tenant) && PyDict_GET_SIZE(queues_.ptr()) == 0 &&
           (throttle_.is_none() ||
            PyDict_GET_SIZE(shapes_.throttle.shares.get(throttle_.ptr())) == 0);
}

// A name that means one pool, and is the same there.
PyObject* Lane::route_of(nb::handle model) const {
    if (!is_current(shapes_.models.version.get(models_.ptr()))) {
        return nullptr;
    }
    // models keeps it until it learns anew
    PyObject* route = look_up(shapes_.models.plain.get(models_.ptr()), model);
    if (route == nullptr || !shapes_.route.fits(route) ||
        PyTuple_GET_SIZE(shapes_.route.copies.get(route)) != 0 ||
        !is_empty_text(shapes_.route.adapter.get(route)) ||
        !is_empty_text(shapes_.route.upstream_model.get(route))) {
        return nullptr;
    }
    return route;
}

// The way to an endpoint, where a connection is idle, young enough and not at its end; else null.
PyObject* Lane::upstream_of(PyObject* endpoint, double now) const {
    PyObject* spec = shapes_.endpoint.spec.get(endpoint);
    PyObject* upstream = look_up(by_id_, shapes_.spec.id.get(spec));
    if (upstream == nullptr ||
        shapes_.upstream.address.get(upstream) != shapes_.spec.address.get(spec)) {
        return nullptr;
    }
    PyObject* pool = shapes_.upstream.pool.get(upstream);
    PyObject* idle = shapes_.pool.idle.get(pool);
    const Py_ssize_t count = PyList_GET_SIZE(idle);
    if (count == 0) {
        return nullptr;
    }
    PyObject* connection = PyList_GET_ITEM(idle, count - 1);
    const double until =
        shapes_.connection.idle_since.as_double(connection) + shapes_.pool.idle_s.as_double(pool);
    if (until <= now || is_closing(shapes_.connection.transport.get(connection))) {
        return nullptr;
    }
    return upstream;
}

nb::object Lane::new_record(const Flight& flight, const Facts& facts, nb::handle model) const {
    auto* type = reinterpret_cast<PyTypeObject*>(shapes_.record.type.ptr());
    nb::object made = owned(type->tp_alloc(type, 0));
    PyObject* record = made.ptr();
    for (const Slot& slot : record_slots_) {
        slot.set(record, nb::borrow(slot.get(template_.ptr())));
    }
    const RecordShape& shape = shapes_.record;
    const auto copy = [record](const Slot& to, PyObject* value) {
        to.set(record, nb::borrow(value));
    };
    PyObject* known_id = shapes_.head.request_id.get(facts.head);
    if (is_empty_text(known_id)) {
        const int64_t number = shapes_.proxy.num_ids.as_int(proxy_.ptr()) + 1;
        shapes_.proxy.num_ids.set(proxy_.ptr(), from_int(number));
        std::string id(text_view(shapes_.proxy.id_prefix.get(proxy_.ptr())));
        std::array<char, 16> digits{};
        id.append(digits.data(), std::to_chars(digits.begin(), digits.end(), number, 16).ptr);
        shape.request_id.set(record, text_of(id));
    } else {
        copy(shape.request_id, known_id);
    }
    copy(shape.route, shapes_.path.path.get(facts.path));
    copy(shape.tenant, shapes_.tenant.name.get(facts.tenant));
    PyObject* client = shapes_.client.client.get(flight.connection.ptr());
    shape.client.set(record,
                     client != Py_None ? nb::borrow(client) : client_.get(flight.connection));
    copy(shape.traceparent, shapes_.facts.traceparent.get(facts.facts));
    copy(shape.model, model.ptr());
    copy(shape.is_known_model, shapes_.route.is_known.get(flight.route.ptr()));
    copy(shape.pool, shapes_.route.pool.get(flight.route.ptr()));
    copy(shape.revision, shapes_.route.revision.get(flight.route.ptr()));
    shape.is_stream.set(record, from_bool(flight.scan.stream));
    copy(shape.attempts, one_.ptr());
    copy(shape.endpoint_id, shapes_.spec.id.get(shapes_.endpoint.spec.get(flight.endpoint.ptr())));
    copy(shape.endpoint, shapes_.lines.authority.get(flight.lines.ptr()));
    copy(shape.policy, flight.policy.ptr());
    shape.request_bytes.set(record, from_int(PyBytes_GET_SIZE(flight.body.ptr())));
    shape.predicted_tokens.set(record, from_int(flight.matched_tokens));
    shape.pick_s.set(record, from_double(now() - flight.attempt_at));
    return made;
}

nb::object Lane::request_bytes(const Flight& flight) const {
    PyObject* head = flight.head.ptr();
    PyObject* lines = flight.lines.ptr();
    const Digits length(bytes_view(flight.body.ptr()).size());
    const bool hides = shapes_.lines.hides_authorization.is_true(lines);
    return join({
        bytes_view(shapes_.head.verb.get(head)),
        bytes_view(shapes_.lines.prefix.get(lines)),
        bytes_view(shapes_.head.target.get(head)),
        bytes_view(shapes_.lines.host.get(lines)),
        bytes_view(shapes_.head.forward.get(head)),
        hides ? std::string_view() : bytes_view(shapes_.head.authorization.get(head)),
        bytes_view(shapes_.lines.extra.get(lines)),
        flight.asks_tokens ? bytes_view(stream_tokens_.ptr()) : std::string_view(),
        kRequestId,
        text_view(shapes_.record.request_id.get(flight.record.ptr())),
        kLengthOfRequest,
        length.view(),
        kEndOfHead,
        bytes_view(flight.body.ptr()),
    });
}

}  // namespace octavo::router
