#include "router/sockets/transport.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "router/sockets/poller.h"

namespace octavo::router {

namespace {

constexpr size_t kMaxPieces = 64;  // to one call of the kernel
constexpr uint32_t kBroken = EPOLLERR | EPOLLHUP;

}  // namespace

nb::object os_error(int number) {
    return owned(PyObject_CallFunction(PyExc_OSError, "is", number, std::strerror(number)));
}

nb::object runtime_error(const std::exception& error) {
    return nb::borrow(PyExc_RuntimeError)(error.what());
}

nb::object Address::as_tuple() const {
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (size > 0 && storage.ss_family == AF_INET) {
        const auto& four = reinterpret_cast<const sockaddr_in&>(storage);
        inet_ntop(AF_INET, &four.sin_addr, text.data(), text.size());
        return nb::make_tuple(text.data(), ntohs(four.sin_port));
    }
    if (size > 0 && storage.ss_family == AF_INET6) {
        const auto& six = reinterpret_cast<const sockaddr_in6&>(storage);
        inet_ntop(AF_INET6, &six.sin6_addr, text.data(), text.size());
        return nb::make_tuple(text.data(), ntohs(six.sin6_port), ntohl(six.sin6_flowinfo),
                              six.sin6_scope_id);
    }
    return nb::none();
}

Transport::Transport(Poller& poller, int fd, nb::handle sock, nb::handle protocol,
                     const Address& peer)
    : poller_(&poller),
      fd_(fd),
      protocol_(nb::borrow(protocol)),
      sock_(nb::borrow(sock)),
      error_(nb::none()),
      peer_(peer) {}

Transport::~Transport() { release(); }

template <typename Call>
void Transport::guard(const Call& call) {
    try {
        call();
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) {
            throw;  // somebody wants the process to end
        }
        poller_->complain("A connection's protocol broke", error.value(), protocol_);
        lose(error.value());
    } catch (const std::exception& error) {  // of native code: the connection is as broken
        const nb::object problem = runtime_error(error);
        poller_->complain("A connection's protocol broke", problem, protocol_);
        lose(problem);
    }
}

template <typename... Arguments>
nb::object Transport::tell(const Attribute& method, const Arguments&... arguments) {
    nb::object told = nb::none();
    guard([&] { told = method.call(protocol_, arguments...); });
    return told;
}

void Transport::begin() {
    tell(poller_->connection_made, nb::object(nb::find(this)));
    if (!is_lost_) {
        watch();
    }
}

// -- reading

void Transport::on_events(uint32_t events) {
    if (is_lost_) {
        return;
    }
    if ((events_ & EPOLLIN) != 0 && (events & (EPOLLIN | kBroken)) != 0) {
        read();
    } else if (is_ended_ && (events & kBroken) != 0) {
        is_shut_ ? lose(nb::none()) : lose(ECONNRESET);  // both have said all, or it was cut
    }
    if (!is_lost_ && is_blocked_ && (events & (EPOLLOUT | kBroken)) != 0) {
        flush();
    }
}

void Transport::read() {
    char* buffer = poller_->buffer();
    const ssize_t count = ::recv(fd_, buffer, Poller::kBufferBytes, 0);
    if (count > 0) {
        guard([&] {
            Taker* taker = poller_->taker();
            if (taker == nullptr || !taker->take(protocol_, {buffer, static_cast<size_t>(count)})) {
                poller_->data_received.call(protocol_,
                                            owned(PyBytes_FromStringAndSize(buffer, count)));
            }
        });
    } else if (count == 0) {
        take_eof();
    } else if (errno != EAGAIN && errno != EINTR) {
        lose(errno);
    }
}

void Transport::take_eof() {
    is_ended_ = true;
    const nb::object goes_on = tell(poller_->eof_received);
    if (is_lost_) {
        return;
    }
    if (goes_on.ptr() == Py_True) {
        watch();
    } else {
        close();
    }
}

void Transport::pause_reading() {
    is_reading_ = false;
    watch();
}

void Transport::resume_reading() {
    is_reading_ = true;
    watch();
}

// -- writing

void Transport::write(nb::handle data) {
    nb::object piece =
        PyBytes_CheckExact(data.ptr()) ? nb::borrow(data) : owned(PyBytes_FromObject(data.ptr()));
    const auto size = static_cast<size_t>(PyBytes_GET_SIZE(piece.ptr()));
    if (wants_eof_) {
        throw std::runtime_error("nothing can be written after write_eof");
    }
    if (size == 0 || is_closing_) {
        return;
    }
    unsent_.push_back(std::move(piece));
    num_unsent_ += size;
    if (is_blocked_) {
        settle();
    } else if (!poller_->is_serving() || num_unsent_ > high_) {
        send();  // so that who answers much at once hears when it is too much
    } else if (!is_queued_) {
        is_queued_ = true;
        poller_->flush_later(*this);
    }
}

void Transport::flush() {
    is_queued_ = false;
    if (!is_lost_) {
        send();
    }
}

void Transport::send() {
    while (num_unsent_ > 0) {
        std::array<iovec, kMaxPieces> pieces;
        const size_t count = std::min(unsent_.size(), kMaxPieces);
        size_t sent = offset_;  // of the piece
        for (size_t i = 0; i < count; ++i) {
            PyObject* piece = unsent_[i].ptr();
            pieces[i] = {PyBytes_AS_STRING(piece) + sent,
                         static_cast<size_t>(PyBytes_GET_SIZE(piece)) - sent};
            sent = 0;
        }
        msghdr message{};
        message.msg_iov = pieces.data();
        message.msg_iovlen = count;
        const ssize_t taken = count == 1
                                  ? ::send(fd_, pieces[0].iov_base, pieces[0].iov_len, MSG_NOSIGNAL)
                                  : ::sendmsg(fd_, &message, MSG_NOSIGNAL);
        if (taken < 0 && errno == EINTR) {
            continue;
        }
        if (taken < 0 && errno != EAGAIN) {
            lose(errno);
            return;
        }
        is_blocked_ = taken < 0;
        if (is_blocked_) {
            break;
        }
        num_unsent_ -= static_cast<size_t>(taken);
        offset_ += static_cast<size_t>(taken);
        while (!unsent_.empty()) {
            const auto size = static_cast<size_t>(PyBytes_GET_SIZE(unsent_.front().ptr()));
            if (offset_ < size) {
                break;
            }
            offset_ -= size;
            unsent_.pop_front();
        }
    }
    settle();
}

// Tells the protocol how it stands, and does what waited for the last byte.
void Transport::settle() {
    watch();
    if (num_unsent_ > high_ && !is_told_to_pause_) {
        is_told_to_pause_ = true;
        tell(poller_->pause_writing);
    } else if (num_unsent_ <= low_ && is_told_to_pause_) {
        is_told_to_pause_ = false;
        tell(poller_->resume_writing);
    }
    if (num_unsent_ > 0 || is_lost_) {
        return;
    }
    if (is_closing_) {
        lose(nb::none());
    } else if (wants_eof_) {
        shut_down();
    }
}

void Transport::write_eof() {
    wants_eof_ = true;
    if (num_unsent_ == 0 && !is_closing_) {
        shut_down();
    }
}

void Transport::shut_down() {
    if (!is_shut_) {
        is_shut_ = true;
        ::shutdown(fd_, SHUT_WR);
    }
}

void Transport::set_write_buffer_limits(size_t high, size_t low) {
    high_ = high;
    low_ = low;
}

// -- ending

void Transport::close() {
    if (is_closing_) {
        return;
    }
    is_closing_ = true;
    if (num_unsent_ == 0) {
        lose(nb::none());
    } else {
        watch();
    }
}

void Transport::abort() { lose(nb::none()); }

void Transport::lose(int number) { lose(os_error(number)); }

void Transport::lose(nb::handle error) {
    if (is_lost_) {
        return;
    }
    is_closing_ = is_lost_ = true;
    if (is_watched_) {  // what still comes is nobody's, and would wake us for ever
        is_watched_ = false;
        poller_->control(EPOLL_CTL_DEL, fd_, 0, nullptr);
    }
    error_ = nb::borrow(error);
    unsent_.clear();
    offset_ = num_unsent_ = 0;
    poller_->report_later(*this);
}

void Transport::report_loss() {
    tell(poller_->connection_lost, error_);
    release();
}

void Transport::forget() {
    is_closing_ = is_lost_ = true;
    unsent_.clear();
    offset_ = num_unsent_ = 0;
    release();
}

void Transport::release() {
    if (fd_ >= 0) {
        if (!sock_.is_none()) {
            sock_.attr("detach")();
        }
        ::close(fd_);
    }
    fd_ = -1;
    poller_ = nullptr;
    sock_ = nb::none();
    protocol_ = nb::none();
}

// -- the rest

// What the poller is to watch of it, as things stand.
void Transport::watch() {
    if (is_lost_) {
        return;
    }
    uint32_t events = 0;
    if (is_reading_ && !is_ended_ && !is_closing_) {
        events |= EPOLLIN;
    }
    if (is_blocked_) {
        events |= EPOLLOUT;
    }
    // Who has said all may still be lost. Who may not speak now is looked at when it may again.
    const bool is_watched = events != 0 || is_ended_;
    if (is_watched == is_watched_ && events == events_) {
        return;
    }
    const int operation = !is_watched ? EPOLL_CTL_DEL : is_watched_ ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (const int problem = poller_->control(operation, fd_, events, this); problem != 0) {
        lose(problem);
        return;
    }
    is_watched_ = is_watched;
    events_ = events;
}

nb::object Transport::get_extra_info(std::string_view name, nb::handle otherwise) {
    if (name == "peername") {
        nb::object peer = peer_.as_tuple();
        return peer.is_none() ? nb::borrow(otherwise) : peer;
    }
    if (fd_ < 0 || (name != "socket" && name != "sockname")) {
        return nb::borrow(otherwise);
    }
    if (sock_.is_none()) {
        const nb::object type = nb::module_::import_("socket").attr("socket");
        sock_ =
            type(static_cast<int>(peer_.storage.ss_family), static_cast<int>(SOCK_STREAM), 0, fd_);
    }
    return name == "socket" ? sock_ : nb::object(sock_.attr("getsockname")());
}

}  // namespace octavo::router
