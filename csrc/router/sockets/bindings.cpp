#include "router/sockets/bindings.h"

#include <nanobind/stl/string_view.h>

#include "router/sockets/poller.h"

using namespace nanobind::literals;

namespace octavo::router {

namespace {

constexpr size_t kDefaultHigh = 64 * 1024;

// asyncio's meaning of what is left out.
void set_limits(Transport& transport, nb::handle high, nb::handle low) {
    const size_t top = !high.is_none() ? nb::cast<size_t>(high)
                       : low.is_none() ? kDefaultHigh
                                       : 4 * nb::cast<size_t>(low);
    const size_t bottom = low.is_none() ? top / 4 : nb::cast<size_t>(low);
    if (bottom > top) {
        throw nb::value_error("low must not exceed high");
    }
    transport.set_write_buffer_limits(top, bottom);
}

}  // namespace

void bind_sockets(nb::module_& module) {
    nb::class_<Transport>(module, "Transport")
        .def("write", &Transport::write)
        .def("write_eof", &Transport::write_eof)
        .def("can_write_eof", [](const Transport&) { return true; })
        .def("close", &Transport::close)
        .def("abort", &Transport::abort)
        .def("is_closing", &Transport::is_closing)
        .def("pause_reading", &Transport::pause_reading)
        .def("resume_reading", &Transport::resume_reading)
        .def("get_write_buffer_size", &Transport::num_unsent)
        .def("set_write_buffer_limits", &set_limits, "high"_a = nb::none(), "low"_a = nb::none())
        .def("get_extra_info", &Transport::get_extra_info, "name"_a, "default"_a = nb::none());
    nb::class_<Opening>(module, "Opening")
        .def("cancel", &Opening::cancel)
        .def("_finish", &Opening::finish);
    nb::class_<Poller>(module, "Poller")
        .def(nb::init<nb::handle>())
        .def("fileno", &Poller::fd)
        .def("poll", &Poller::poll)
        .def("close", &Poller::close)
        .def("listen", &Poller::listen)
        .def("ignore", &Poller::ignore)
        .def("open", &Poller::open)
        .def("adopt", &Poller::adopt)
        .def("show_first", &Poller::show_first)
        .def("_listen_again", &Poller::listen_again)
        .def("_report_losses", &Poller::report_losses);
}

}  // namespace octavo::router
