#pragma once

#include <nanobind/nanobind.h>

namespace octavo::router {

void bind_sockets(nanobind::module_& module);

}  // namespace octavo::router
