#pragma once

#include <nanobind/nanobind.h>

namespace octavo::router {

void bind_underway(nanobind::module_& module);
void bind_express(nanobind::module_& module);

}  // namespace octavo::router
