#include "router/sockets/opening.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "router/sockets/poller.h"

namespace octavo::router {

Opening::Opening(Poller& poller, int fd, nb::handle protocol, nb::handle on_done,
                 const Address& peer)
    : poller_(&poller),
      fd_(fd),
      protocol_(nb::borrow(protocol)),
      on_done_(nb::borrow(on_done)),
      peer_(peer) {}

Opening::~Opening() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

void Opening::begin() {
    int error = 0;
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&peer_.storage), peer_.size) != 0 &&
        errno != EINPROGRESS && errno != EINTR) {
        error = errno;
    }
    if (error == 0) {
        error = poller_->control(EPOLL_CTL_ADD, fd_, EPOLLOUT, this);
    }
    if (error != 0) {
        poller_->call_soon(nb::find(this).attr("_finish"), nb::int_(error));
    }
}

void Opening::on_events(uint32_t) {
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
    }
    finish(error);
}

void Opening::finish(int error) {
    if (fd_ < 0) {
        return;
    }
    Poller& poller = *poller_;
    const nb::object protocol = protocol_, on_done = on_done_;
    nb::object problem = nb::none();
    if (error == 0) {
        const int fd = std::exchange(fd_, -1);
        poller.control(EPOLL_CTL_DEL, fd, 0, nullptr);
        poller.take_over(fd, peer_, protocol);
    } else {
        problem = os_error(error);
    }
    end();
    try {
        on_done(problem);
    } catch (nb::python_error& broken) {
        if (!broken.matches(PyExc_Exception)) {
            throw;
        }
        poller.complain("Who waited for a connection broke", broken.value(), protocol);
    } catch (const std::exception& broken) {
        poller.complain("Who waited for a connection broke", runtime_error(broken), protocol);
    }
}

void Opening::cancel() {
    if (fd_ >= 0) {
        end();
    }
}

void Opening::end() {
    Poller* poller = poller_;
    forget();
    poller->let_go(*this);
}

void Opening::forget() {
    if (const int fd = std::exchange(fd_, -1); fd >= 0) {
        ::close(fd);
    }
    poller_ = nullptr;
    protocol_ = nb::none();
    on_done_ = nb::none();
}

}  // namespace octavo::router
