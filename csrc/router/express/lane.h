// The express lane: a request that nothing happens to, from its bytes to its answer's, in two
// calls.
//
// `begin` takes a request from its client to an engine, `land` its answer back. They do what
// proxy/service.py, proxy/exchange.py and all that those call do, on the same Python objects, so
// that whoever looks or goes on from there finds what they would have left behind. Between the two
// calls a `Flight` stands for the request. Whatever is not usual takes the long way, in Python:
// before it has begun, because `begin` decides before it changes anything; later, because a flight
// can become an exchange at any moment (proxy/express.py).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "router/express/placing.h"
#include "router/express/shapes.h"
#include "router/scan.h"
#include "router/sockets/taker.h"
#include "router/usage.h"

namespace octavo::router {

class Lane;

// A request under way: what Exchange, Account, Ticket and Lease would hold.
struct Flight {
    Lane* lane = nullptr;  // lives as long as its proxy
    nb::object successor;  // the exchange that it became
    nb::object connection, head, body, path, record, tenant, route;
    nb::object endpoint, lines, upstream, policy, reason;
    nb::object key;  // its body's, for the quarantine
    Scan scan;
    Underway::Keys keys;
    Names names;
    int64_t prompt_tokens = 0;
    int64_t matched_tokens = 0;
    int64_t uncached_tokens = 0;
    int64_t generation = 0;
    bool is_computing = false;
    bool asks_tokens = false;  // of the engine, so that its stream can go on elsewhere
    bool is_landing = false;   // its answer is being written
    bool is_over = false;
    double began_at = 0.0;
    double attempt_at = 0.0;
    double total_at = 0.0;
};

class Lane final : public Taker {
  public:
    // `take_over` makes an exchange of a flight, `broke` ends one that an error of ours has hit.
    Lane(nb::handle proxy, nb::handle take_over, nb::handle broke);

    // True: it is on its way. Else the long way: False, or the body's scan where it was read.
    nb::object begin(nb::handle connection, nb::handle head, nb::handle body);

    // What a flight's connection to its engine calls with the answer.
    void on_whole(nb::handle self, nb::handle head, nb::handle body);

    // What a socket has received: whole requests and answers of the usual kind are taken.
    bool take(nb::handle protocol, std::string_view data) override;

    // Requests that went this way.
    int64_t num_flights() const { return num_flights_; }

    // The exchange that a flight has become, or becomes now.
    nb::object exchange_of(nb::handle self) const;

  private:
    struct Facts {  // of a head that may go this way
        PyObject *head, *facts, *path, *tenant;
    };

    // False: this answer wants a closer look, and nothing has happened.
    bool land(nb::handle self, Flight& flight, nb::handle head, nb::handle body);
    bool take_request(nb::handle connection, std::string_view data);
    bool take_answer(PyObject* connection, std::string_view data);
    void give_back(PyObject* connection);
    nb::object tenant_of(PyObject* head, PyObject* facts) const;
    void write(PyObject* transport, nb::handle data, PyObject* method) const;
    bool is_closing(PyObject* transport) const;
    bool has_unsent(PyObject* transport) const;
    void count(PyObject* record) const;
    void send(nb::handle connection, nb::handle flight, nb::handle data) const;
    bool is_flight(nb::handle object) const {
        return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(flight_type_.ptr());
    }
    bool read_facts(PyObject* connection, PyObject* head, Facts& facts) const;
    bool is_open(PyObject* tenant) const;
    bool is_current(PyObject* version) const;
    PyObject* route_of(nb::handle model) const;
    PyObject* upstream_of(PyObject* endpoint, double now) const;
    double rate_of(nb::handle pool) const;
    nb::object key_of(PyObject* pool, PyObject* path, nb::handle body) const;
    nb::object new_record(const Flight& flight, const Facts& facts, nb::handle model) const;
    void finish_lease(const Flight& flight, double now, const Usage& usage);
    void note_health(const Flight& flight, double now, const Usage& usage);
    void count_window(PyObject* window, double now, double second) const;
    void finish_connection(const Flight& flight, double now) const;
    double now() const;

    nb::object request_bytes(const Flight& flight) const;
    nb::object answer_bytes(const Flight& flight, nb::handle head, nb::handle body) const;

    Shapes shapes_;
    nb::object proxy_, take_over_, broke_, clock_;
    nb::object registry_, dispatcher_, gate_, models_, budget_, upstreams_, metrics_, access_log_;
    nb::object observer_, health_, throttle_;  // None where there is none
    nb::object quarantine_;
    nb::object exchanges_, queues_, candidates_, by_id_, tenants_, rates_, watched_;
    nb::object template_;  // a record without a request
    int64_t num_flights_ = 0;
    std::vector<Slot> record_slots_;
    Placing placing_;
    int64_t head_state_, busy_state_, idle_state_, awaiting_state_, max_idle_;
    int64_t min_underway_tokens_, min_rate_bytes_, max_watched_;
    double tokens_per_byte_, rate_weight_, chunk_bytes_;
    nb::object ok_, result_ok_, zero_, one_, two_hundred_, never_, flight_type_;
    nb::object policy_name_, by_keys_, stream_tokens_;
    nb::object transport_type_;  // of native sockets; none where they were not built
    [[maybe_unused]] bool is_system_clock_;
    Py_ssize_t bundle_;

    Attribute forget_{"forget"};
    Attribute begin_{"begin"}, client_{"client"}, count_{"count"}, fold_{"fold"};
    Attribute give_back_{"give_back"}, hand_over_{"hand_over"}, known_{"known"}, note_{"note"};
    Attribute append_{"append"}, make_record_{"_record"}, send_{"send"}, wake_{"wake"};
    Attribute is_closing_{"is_closing"}, num_unsent_{"get_write_buffer_size"};
    Attribute takes_all_{"takes_all"}, write_{"write"};
};

}  // namespace octavo::router
