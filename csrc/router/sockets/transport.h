// One plain TCP connection with the face of asyncio's transports: what the kernel has goes straight
// to the protocol, and what the protocol writes goes straight to the kernel.
//
// What is written while an event is handled leaves together when it has been, or when it is much:
// one call of the kernel, as a rule. At any other time it leaves at once. Nothing calls back into a
// protocol from within a call of its own but `pause_writing` and `resume_writing`: a loss is told
// by the loop.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <deque>
#include <exception>

#include "router/express/slots.h"

namespace octavo::router {

class Poller;

// Whatever a poller watches.
class Watched {
  public:
    virtual ~Watched() = default;
    virtual void on_events(uint32_t events) = 0;
};

struct Address {
    sockaddr_storage storage{};
    socklen_t size = sizeof(sockaddr_storage);

    // As Python's sockets show it; None where there is none.
    nb::object as_tuple() const;
};

nb::object os_error(int number);
// What a native mistake is to Python.
nb::object runtime_error(const std::exception& error);

class Transport final : public Watched {
  public:
    // Takes over the file descriptor; `sock` is the Python socket that holds it, or None.
    Transport(Poller& poller, int fd, nb::handle sock, nb::handle protocol, const Address& peer);
    ~Transport() override;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    // As asyncio's.
    void write(nb::handle data);
    void write_eof();
    void close();
    void abort();
    void pause_reading();
    void resume_reading();
    bool is_closing() const { return is_closing_; }
    size_t num_unsent() const { return num_unsent_; }
    void set_write_buffer_limits(size_t high, size_t low);
    nb::object get_extra_info(std::string_view name, nb::handle otherwise);

    // For the poller.
    void begin();  // connection_made, and reading
    void on_events(uint32_t events) override;
    void flush();        // what was written meanwhile
    void report_loss();  // connection_lost: the last call that the protocol gets
    void forget();       // the poller is gone: so is the connection
    bool is_lost() const { return is_lost_; }

  private:
    void read();
    void take_eof();
    void send();
    void lose(nb::handle error);
    void lose(int number);
    void settle();  // after a send
    void watch();
    void shut_down();
    void release();
    // A call of the protocol's. What it raises ends the connection, and is told to the loop.
    template <typename Call>
    void guard(const Call& call);
    template <typename... Arguments>
    nb::object tell(const Attribute& method, const Arguments&... arguments);

    Poller* poller_;
    int fd_;
    uint32_t events_ = 0;  // that are watched
    bool is_watched_ = false;
    bool is_reading_ = true;   // unless it was paused
    bool is_ended_ = false;    // the peer has nothing more to say
    bool is_blocked_ = false;  // the kernel takes no more for now
    bool is_queued_ = false;   // to be flushed
    bool is_told_to_pause_ = false;
    bool wants_eof_ = false;
    bool is_shut_ = false;
    bool is_closing_ = false;
    bool is_lost_ = false;
    nb::object protocol_, sock_, error_;
    Address peer_;
    std::deque<nb::object> unsent_;
    size_t offset_ = 0;      // of the first one, that is sent
    size_t num_unsent_ = 0;  // bytes
    size_t high_ = 64 * 1024;
    size_t low_ = 16 * 1024;
};

}  // namespace octavo::router
