// The plain sockets of an event loop: watched by an epoll of their own, which the loop watches as
// one file. A wakeup of the loop serves all sockets that are ready, without a callback of the
// loop's for each read and each write.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "router/sockets/opening.h"
#include "router/sockets/taker.h"
#include "router/sockets/transport.h"

namespace octavo::router {

// A socket that others connect to.
class Listener final : public Watched {
  public:
    Listener(Poller& poller, nb::handle sock, nb::handle factory);
    void on_events(uint32_t events) override;
    void resume();
    void end() { fd_ = -1; }

  private:
    void pause(int error);

    Poller& poller_;
    nb::object sock_, factory_;
    int fd_;
    bool is_paused_ = true;
};

class Poller {
  public:
    explicit Poller(nb::handle loop);
    ~Poller();
    Poller(const Poller&) = delete;
    Poller& operator=(const Poller&) = delete;

    int fd() const { return fd_; }
    // Serves what is ready: the loop calls it when `fd` is readable.
    void poll();
    // Ends all connections without a word to their protocols. Nothing can be done after it.
    void close();

    // Connections that are accepted get protocols from the factory, until `ignore`.
    void listen(nb::handle sock, nb::handle factory);
    void ignore(nb::handle sock);
    void listen_again(int fd);
    // Takes over a connected socket that does not block. The transport.
    nb::object adopt(nb::handle sock, nb::handle protocol);

    // A connection to a numeric address, on its way; None where the host is a name.
    nb::object open(const char* host, uint16_t port, nb::handle protocol, nb::handle on_done);

    // Sees what connections receive before their protocols do.
    void show_first(nb::handle taker);

    // For what is watched.
    // 0, or what is wrong.
    int control(int operation, int fd, uint32_t events, Watched* watched) const;
    void welcome(int fd, const Address& peer, nb::handle factory);
    void take_over(int fd, const Address& peer, nb::handle protocol);
    void let_go(Opening& opening);
    bool is_serving() const { return is_serving_; }
    void flush_later(Transport& transport) { written_.push_back(&transport); }
    void report_later(Transport& transport);
    void report_losses();
    void complain(const char* what, nb::handle error, nb::handle protocol) const;
    void call_soon(nb::handle function, nb::handle argument) const;
    void call_later(double seconds, nb::handle function, nb::handle argument) const;
    nb::object self() const { return nb::find(this); }
    char* buffer() { return buffer_.get(); }
    Taker* taker() const { return taker_; }

    static constexpr size_t kBufferBytes = 256 * 1024;

    const Attribute connection_made{"connection_made"};
    const Attribute data_received{"data_received"};
    const Attribute eof_received{"eof_received"};
    const Attribute connection_lost{"connection_lost"};
    const Attribute pause_writing{"pause_writing"};
    const Attribute resume_writing{"resume_writing"};

  private:
    void serve(Watched& watched, uint32_t events);
    void keep(Transport* transport);
    void flush_written();

    nb::object loop_, taker_object_;
    Taker* taker_ = nullptr;
    int fd_;
    bool is_serving_ = false;
    bool is_reporting_ = false;  // the loop was asked to
    std::unique_ptr<char[]> buffer_;
    std::unordered_map<Transport*, nb::object> transports_;  // those that are not lost
    std::unordered_map<int, std::unique_ptr<Listener>> listeners_;
    std::unordered_map<Opening*, nb::object> openings_;
    // What is over may be on the list that is being served: it stays until the next one.
    std::vector<std::unique_ptr<Listener>> ignored_;
    std::vector<nb::object> spent_;
    std::vector<Transport*> written_;
    std::vector<Transport*> lost_;
};

}  // namespace octavo::router
