// Who may take what a connection has received, before its protocol is told.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace octavo::router {

class Taker {
  public:
    virtual ~Taker() = default;
    // False: nothing has happened, and the protocol is told as usual.
    virtual bool take(nanobind::handle protocol, std::string_view data) = 0;
};

}  // namespace octavo::router
