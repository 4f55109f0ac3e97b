#include "router/sockets/poller.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <exception>
#include <stdexcept>
#include <utility>

namespace octavo::router {

namespace {

constexpr int kMaxEvents = 64;  // at once
constexpr int kMaxRounds = 4;   // between two looks of the loop at everything else
// Connections that wait for one another: the kernel and we get in each other's way less often.
constexpr size_t kMaxUnflushed = 16;
constexpr int kMaxAccepted = 64;  // at once, of one listener
constexpr double kPauseS = 1.0;   // after the system had no room for another connection

[[noreturn]] void raise_error() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

int fd_of(nb::handle sock) {
    const int fd = nb::cast<int>(sock.attr("fileno")());
    if (fd < 0) {
        throw nb::value_error("the socket is closed");
    }
    return fd;
}

// Answers are small and written whole: nothing is gained by waiting for more.
void send_at_once(int fd) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

bool read_address(const char* host, uint16_t port, Address& address) {
    auto& four = reinterpret_cast<sockaddr_in&>(address.storage);
    auto& six = reinterpret_cast<sockaddr_in6&>(address.storage);
    if (::inet_pton(AF_INET, host, &four.sin_addr) == 1) {
        four.sin_family = AF_INET;
        four.sin_port = htons(port);
        address.size = sizeof four;
        return true;
    }
    if (::inet_pton(AF_INET6, host, &six.sin6_addr) == 1) {
        six.sin6_family = AF_INET6;
        six.sin6_port = htons(port);
        address.size = sizeof six;
        return true;
    }
    return false;
}

}  // namespace

// -- listeners

Listener::Listener(Poller& poller, nb::handle sock, nb::handle factory)
    : poller_(poller), sock_(nb::borrow(sock)), factory_(nb::borrow(factory)), fd_(fd_of(sock)) {
    send_at_once(fd_);  // whom it accepts inherits that
    resume();
}

void Listener::resume() {
    if (is_paused_) {
        is_paused_ = poller_.control(EPOLL_CTL_ADD, fd_, EPOLLIN, this) != 0;
    }
    if (is_paused_) {
        raise_error();
    }
}

void Listener::on_events(uint32_t) {
    for (int i = 0; i < kMaxAccepted && fd_ >= 0; ++i) {
        Address peer;
        const int fd = ::accept4(fd_, reinterpret_cast<sockaddr*>(&peer.storage), &peer.size,
                                 SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            poller_.welcome(fd, peer, factory_);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno != ECONNABORTED && errno != EINTR) {
            pause(errno);
            return;
        }
    }
}

// Too many files are open, or there is no memory: waiting connections stay where they are.
void Listener::pause(int error) {
    poller_.complain("No connection can be accepted for a moment", os_error(error), nb::none());
    poller_.control(EPOLL_CTL_DEL, fd_, 0, this);
    is_paused_ = true;
    poller_.call_later(kPauseS, poller_.self().attr("_listen_again"), nb::int_(fd_));
}

// -- the poller

Poller::Poller(nb::handle loop)
    : loop_(nb::borrow(loop)),
      fd_(::epoll_create1(EPOLL_CLOEXEC)),
      buffer_(std::make_unique_for_overwrite<char[]>(kBufferBytes)) {
    if (fd_ < 0) {
        raise_error();
    }
}

Poller::~Poller() { close(); }

void Poller::close() {
    if (is_serving_) {
        throw std::runtime_error("a connection cannot close what serves it");
    }
    if (fd_ >= 0) {
        ::close(fd_);
        fd_ = -1;
    }
    const auto transports = std::move(transports_);
    transports_.clear();
    for (const auto& [transport, held] : transports) {
        transport->forget();
    }
    const auto openings = std::move(openings_);
    openings_.clear();
    for (const auto& [opening, held] : openings) {
        opening->forget();
    }
    listeners_.clear();
    written_.clear();
    lost_.clear();
}

int Poller::control(int operation, int fd, uint32_t events, Watched* watched) const {
    epoll_event event{};
    event.events = events;
    event.data.ptr = watched;
    return ::epoll_ctl(fd_, operation, fd, &event) == 0 ? 0 : errno;
}

void Poller::poll() {
    ignored_.clear();
    spent_.clear();
    std::array<epoll_event, kMaxEvents> ready;
    // Under load more is ready by now: a look here is cheaper than a turn of the loop.
    for (int round = 0; round < kMaxRounds && fd_ >= 0; ++round) {
        const int count = ::epoll_wait(fd_, ready.data(), kMaxEvents, 0);
        if (count <= 0) {
            return;
        }
        for (int i = 0; i < count; ++i) {
            const epoll_event& event = ready[static_cast<size_t>(i)];
            serve(*static_cast<Watched*>(event.data.ptr), event.events);
        }
        flush_written();
    }
}

void Poller::serve(Watched& watched, uint32_t events) {
    struct Serving {
        explicit Serving(bool& flag) : flag(flag) { flag = true; }
        ~Serving() { flag = false; }
        bool& flag;
    };
    try {
        const Serving serving(is_serving_);
        watched.on_events(events);
    } catch (...) {  // somebody wants the process to end
        flush_written();
        throw;
    }
    if (written_.size() >= kMaxUnflushed) {
        flush_written();
    }
}

void Poller::flush_written() {
    std::exception_ptr problem;
    for (size_t i = 0; i < written_.size(); ++i) {  // a flush may let a protocol write more
        try {
            written_[i]->flush();
        } catch (...) {  // the others are flushed all the same, and none of them twice
            problem = std::current_exception();
        }
    }
    written_.clear();
    if (problem) {
        std::rethrow_exception(problem);
    }
}

void Poller::listen(nb::handle sock, nb::handle factory) {
    const int fd = fd_of(sock);
    listeners_[fd] = std::make_unique<Listener>(*this, sock, factory);
}

void Poller::ignore(nb::handle sock) {
    const auto found = listeners_.find(fd_of(sock));
    if (found == listeners_.end()) {
        return;
    }
    control(EPOLL_CTL_DEL, found->first, 0, nullptr);  // unless it is paused
    found->second->end();
    ignored_.push_back(std::move(found->second));
    listeners_.erase(found);
}

void Poller::listen_again(int fd) {
    const auto found = listeners_.find(fd);
    if (found != listeners_.end()) {
        found->second->resume();
    }
}

void Poller::welcome(int fd, const Address& peer, nb::handle factory) {
    nb::object protocol;
    try {
        protocol = factory();
    } catch (...) {
        ::close(fd);
        throw;
    }
    take_over(fd, peer, protocol);
}

void Poller::take_over(int fd, const Address& peer, nb::handle protocol) {
    keep(new Transport(*this, fd, nb::none(), protocol, peer));
}

nb::object Poller::open(const char* host, uint16_t port, nb::handle protocol, nb::handle on_done) {
    Address peer;
    if (!read_address(host, port, peer)) {
        return nb::none();
    }
    const int fd = ::socket(peer.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        raise_error();
    }
    send_at_once(fd);
    auto* opening = new Opening(*this, fd, protocol, on_done, peer);
    const nb::object handle = nb::cast(opening, nb::rv_policy::take_ownership);
    openings_.emplace(opening, handle);
    opening->begin();
    return handle;
}

void Poller::let_go(Opening& opening) {
    const auto found = openings_.find(&opening);
    if (found != openings_.end()) {
        spent_.push_back(std::move(found->second));
        openings_.erase(found);
    }
}

void Poller::show_first(nb::handle taker) {
    taker_ = nb::cast<Taker*>(taker);
    taker_object_ = nb::borrow(taker);
}

nb::object Poller::adopt(nb::handle sock, nb::handle protocol) {
    const int fd = fd_of(sock);
    Address peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer.storage), &peer.size) != 0) {
        peer.size = 0;  // it is gone again, which the first read will say
    }
    send_at_once(fd);
    auto* transport = new Transport(*this, fd, sock, protocol, peer);
    keep(transport);
    return nb::find(transport);
}

void Poller::keep(Transport* transport) {
    transports_.emplace(transport, nb::cast(transport, nb::rv_policy::take_ownership));
    transport->begin();
}

void Poller::report_later(Transport& transport) {
    lost_.push_back(&transport);
    if (!is_reporting_) {
        is_reporting_ = true;
        loop_.attr("call_soon")(self().attr("_report_losses"));
    }
}

void Poller::report_losses() {
    is_reporting_ = false;
    for (Transport* transport : std::exchange(lost_, {})) {
        const auto found = transports_.find(transport);
        if (found == transports_.end()) {
            continue;
        }
        const nb::object held = std::move(found->second);
        transports_.erase(found);
        transport->report_loss();
    }
}

void Poller::complain(const char* what, nb::handle error, nb::handle protocol) const {
    nb::dict context;
    context["message"] = what;
    context["exception"] = error;
    context["protocol"] = protocol;
    loop_.attr("call_exception_handler")(context);
}

void Poller::call_soon(nb::handle function, nb::handle argument) const {
    loop_.attr("call_soon")(function, argument);
}

void Poller::call_later(double seconds, nb::handle function, nb::handle argument) const {
    loop_.attr("call_later")(seconds, function, argument);
}

}  // namespace octavo::router
