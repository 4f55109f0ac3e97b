// A connection on its way: no task waits for it, the poller tells.
#pragma once

#include "router/sockets/transport.h"

namespace octavo::router {

class Opening final : public Watched {
  public:
    // `on_done` hears None once the protocol has its transport, else an OSError; never from here.
    Opening(Poller& poller, int fd, nb::handle protocol, nb::handle on_done, const Address& peer);
    ~Opening() override;
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

    void begin();
    void cancel();  // then nobody hears anything
    void on_events(uint32_t events) override;
    void finish(int error);
    void forget();  // the poller is gone

  private:
    void end();  // it is nobody's any more

    Poller* poller_;
    int fd_;
    nb::object protocol_, on_done_;
    Address peer_;
};

}  // namespace octavo::router
