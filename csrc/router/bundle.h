// Requests that are over, sorted out by kind: the compiled twin of metrics/columns.py.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::router {

void bind_bundle(nanobind::module_& module);

}  // namespace octavo::router
