#include "router/express/lane.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>

#include "router/json_reader.h"
#include "router/usage.h"

using namespace nanobind::literals;

namespace octavo::router {

namespace {

constexpr std::string_view kRequestId = "x-request-id: ";
constexpr std::string_view kLengthOfRequest = "\r\ncontent-length: ";
constexpr std::string_view kOk = "HTTP/1.1 200 OK\r\n";
constexpr std::string_view kLengthOfAnswer = "content-length: ";
constexpr std::string_view kEndOfHead = "\r\n\r\n";

nb::object from(const char* module, const char* name) {
    return nb::module_::import_(module).attr(name);
}

std::string_view bytes_view(PyObject* bytes) {
    if (!PyBytes_Check(bytes)) {
        throw nb::type_error("bytes were expected");
    }
    return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

std::string_view text_view(PyObject* text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) {
        throw nb::python_error();
    }
    return {data, static_cast<size_t>(size)};
}

nb::object text_of(std::string_view text) {
    return owned(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

bool is_empty_text(PyObject* text) { return PyUnicode_GET_LENGTH(text) == 0; }

nb::object join(std::initializer_list<std::string_view> parts) {
    size_t size = 0;
    for (const std::string_view part : parts) {
        size += part.size();
    }
    nb::object joined = owned(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char* end = PyBytes_AS_STRING(joined.ptr());
    for (const std::string_view part : parts) {
        end = std::copy(part.begin(), part.end(), end);
    }
    return joined;
}

// A number as decimal digits.
class Digits {
  public:
    explicit Digits(size_t number)
        : size_(static_cast<size_t>(std::to_chars(text_, text_ + sizeof text_, number).ptr -
                                    text_)) {}
    std::string_view view() const { return {text_, size_}; }

  private:
    char text_[20];
    size_t size_;
};

}  // namespace

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
      two_hundred_(from_int(200)) {
    for (const nb::handle name : shapes_.record.type.attr("__slots__")) {
        record_slots_.emplace_back(shapes_.record.type, nb::cast<nb::str>(name).c_str());
    }
}

double Lane::now() const { return to_double(owned(PyObject_CallNoArgs(clock_.ptr())).ptr()); }

// -- departing

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
    PyObject* route = scan.stream ? nullptr : route_of(model);
    if (route == nullptr || !is_open(facts.tenant)) {
        return long_way();
    }
    PyObject* pool = shapes_.route.pool.get(route);
    const nb::object key = owned(PyTuple_Pack(2, pool, shapes_.route.revision.get(route)));
    PyObject* candidates = look_up(candidates_, key);
    PyObject* window = look_up(tenants_, shapes_.tenant.name.get(facts.tenant));
    const nb::object policies = policies_.get(dispatcher_);
    const nb::object by_pool = by_pool_.get(policies);
    PyObject* own_policy = look_up(by_pool, pool);
    const nb::object policy =
        own_policy != nullptr ? nb::borrow(own_policy) : default_.get(policies);
    const int64_t num_picks = num_picks_.as_int(dispatcher_) + 1;
    if (candidates == nullptr ||
        Py_TYPE(policy.ptr()) != reinterpret_cast<PyTypeObject*>(placing_.prefix_load().ptr()) ||
        num_picks % sample_every_.as_int(dispatcher_) == 0) {  // this one is looked at closely
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
    flight->policy = name_.get(policy);
    flight->reason = choice->reason;
    flight->keys = std::make_shared<const std::string>(std::move(scan.keys));
    flight->matched_tokens = choice->matched_tokens;
    flight->uncached_tokens = std::max<int64_t>(flight->prompt_tokens - choice->matched_tokens, 1);
    flight->began_at = began_at;
    flight->attempt_at = placed_at;
    const nb::object timeouts = timeouts_.get(proxy_);
    flight->total_at = began_at + shapes_.timeouts.total_s.as_double(timeouts.ptr());
    if (PyList_SetSlice(connections, last, last + 1, nullptr) != 0) {
        throw nb::python_error();
    }

    ++num_flights_;
    shapes_.tenant.in_flight.add(facts.tenant, int64_t{1});
    if (window == nullptr) {  // its first one
        begin_.call(budget_, nb::handle(shapes_.tenant.name.get(facts.tenant)),
                    from_double(began_at));
    } else {
        num_active_.add(budget_, 1);
        count_window(window, began_at, 0.0);
    }
    num_picks_.set(dispatcher_, from_int(num_picks));
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
        put(placed_at_.get(observer_), pool, from_double(placed_at));
        count_one(picks_.get(observer_),
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
        send_.call(under_way.upstream, self, request_bytes(under_way));
    } catch (nb::python_error& error) {
        broke(self, error.value());
        return from_bool(true);
    }
    const double first_token_s = shapes_.timeouts.first_token_s.as_double(timeouts.ptr()) +
                                 shapes_.timeouts.first_token_per_1k_s.as_double(timeouts.ptr()) *
                                     (static_cast<double>(under_way.prompt_tokens) / 1000.0);
    client.deadline.set(connection.ptr(), from_double(std::min(under_way.attempt_at + first_token_s,
                                                               under_way.total_at)));
    return from_bool(true);
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
           !shapes_.facts.explain.is_true(facts.facts) &&
           shapes_.facts.timeout_s.as_double(facts.facts) == 0.0 &&
           own_version_.as_int(proxy_) == version_.as_int(registry_) &&
           PyDict_GET_SIZE(adapters_.get(proxy_).ptr()) == 0;
}

// gate.admit: nobody waits, nothing is asked of the tenant, nothing is refused at once.
bool Lane::is_open(PyObject* tenant) const {
    return shapes_.tenant.is_free.is_true(tenant) && PyDict_GET_SIZE(queues_.ptr()) == 0 &&
           (throttle_.is_none() || PyDict_GET_SIZE(shares_.get(throttle_).ptr()) == 0);
}

// A name that means one pool, and is the same there.
PyObject* Lane::route_of(nb::handle model) const {
    if (own_version_.as_int(models_) != version_.as_int(registry_)) {
        return nullptr;
    }
    PyObject* route = look_up(plain_.get(models_), model);  // models keeps it until it learns anew
    if (route == nullptr || !shapes_.route.fits(route) ||
        PyTuple_GET_SIZE(shapes_.route.copies.get(route)) != 0 ||
        !is_empty_text(shapes_.route.adapter.get(route)) ||
        !is_empty_text(shapes_.route.upstream_model.get(route))) {
        return nullptr;
    }
    return route;
}

// The way to an endpoint, where a connection is idle and young enough; else null.
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
    return until > now ? upstream : nullptr;
}

double Lane::rate_of(nb::handle pool) const {
    PyObject* rate = look_up(rates_, pool);
    return rate == nullptr ? tokens_per_byte_ : to_double(rate);
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
        const int64_t number = num_ids_.as_int(proxy_) + 1;
        num_ids_.set(proxy_, from_int(number));
        std::array<char, 17> digits{};
        std::to_chars(digits.data(), digits.data() + digits.size() - 1, number, 16);
        const nb::object prefix = id_prefix_.get(proxy_);
        shape.request_id.set(record,
                             owned(PyUnicode_FromFormat("%U%s", prefix.ptr(), digits.data())));
    } else {
        copy(shape.request_id, known_id);
    }
    copy(shape.route, shapes_.path.path.get(facts.path));
    copy(shape.tenant, shapes_.tenant.name.get(facts.tenant));
    shape.client.set(record, client_.get(flight.connection));
    copy(shape.traceparent, shapes_.facts.traceparent.get(facts.facts));
    copy(shape.model, model.ptr());
    copy(shape.is_known_model, shapes_.route.is_known.get(flight.route.ptr()));
    copy(shape.pool, shapes_.route.pool.get(flight.route.ptr()));
    copy(shape.revision, shapes_.route.revision.get(flight.route.ptr()));
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
        bytes_view(shapes_.head.target.get(head)),
        bytes_view(shapes_.lines.host.get(lines)),
        bytes_view(shapes_.head.forward.get(head)),
        hides ? std::string_view() : bytes_view(shapes_.head.authorization.get(head)),
        bytes_view(shapes_.lines.extra.get(lines)),
        kRequestId,
        text_view(shapes_.record.request_id.get(flight.record.ptr())),
        kLengthOfRequest,
        length.view(),
        kEndOfHead,
        bytes_view(flight.body.ptr()),
    });
}

// -- landing

bool Lane::land(nb::handle self, Flight& flight, nb::handle head, nb::handle body) {
    PyObject* connection = flight.connection.ptr();
    const ClientShape& client = shapes_.client;
    PyObject* shared = client.shared.get(connection);
    const bool is_plain =
        shapes_.answer.fits(head.ptr()) && PyBytes_CheckExact(body.ptr()) &&
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
    owned(PyObject_CallOneArg(client.write.get(connection), answer.ptr()));
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

    finish_lease(flight, ended_at, usage.prompt_tokens, usage.output_tokens);
    shapes_.tenant.in_flight.add(flight.tenant.ptr(), int64_t{-1});
    if (PySet_Discard(exchanges_.ptr(), self.ptr()) < 0) {
        throw nb::python_error();
    }
    num_active_.add(budget_, -1);
    finish_.call(metrics_, flight.record);
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
void Lane::finish_lease(const Flight& flight, double now, int64_t prompt_tokens,
                        int64_t output_tokens) {
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
        note_health(flight, now, output_tokens);
    }
    if (!observer_.is_none()) {
        count_one(ends_.get(observer_), owned(PyTuple_Pack(3, endpoint, pool, ok_.ptr())));
    }
    if (!throttle_.is_none()) {
        PyObject* window = look_up(pools_.get(throttle_), pool);
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
void Lane::note_health(const Flight& flight, double now, int64_t output_tokens) {
    PyObject* id = shapes_.spec.id.get(shapes_.endpoint.spec.get(flight.endpoint.ptr()));
    const nb::object known = endpoints_.get(registry_);
    if (look_up(known, id) != flight.endpoint.ptr()) {
        return;  // a late end; what was forgotten stays so
    }
    const nb::object records = records_.get(health_);
    PyObject* found = look_up(records, id);
    const nb::object record =
        found != nullptr ? nb::borrow(found) : make_record_.call(health_, flight.endpoint);
    const nb::object at = from_double(now);
    const nb::object token_s = output_tokens > 1 ? from_double(0.0) : nb::none();
    shapes_.health.last_at.set(record.ptr(), at);
    append_.call(nb::borrow(shapes_.health.samples.get(record.ptr())),
                 owned(PyTuple_Pack(3, at.ptr(), Py_False, token_s.ptr())));
    shapes_.health.num_failures.set(record.ptr(), zero_);
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

// ClientConnection.finish of one that stays open; what comes next begins.
void Lane::finish_connection(const Flight& flight, double now) const {
    PyObject* connection = flight.connection.ptr();
    const ClientShape& client = shapes_.client;
    if (client.state.as_int(connection) != busy_state_ ||
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
