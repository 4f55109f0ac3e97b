"""Listening sockets, and how many connections the process can afford."""

from __future__ import annotations

import socket
from typing import Final

from octavo_common.file_limit import raise_file_limit
from octavo_router.errors import ConfigInvalid

BACKLOG: Final = 4096
# The kernel takes megabytes for a client that does not read. With this bound on what it has not
# sent, such a client is noticed at once, and so is it by the engine.
UNSENT_BYTES: Final = 64 * 2**10
_OTHERS: Final = {
    "server": "others with --host, --port",
    "server.admin_port": "others with --admin-host, --admin-port",
}
FD_RESERVE: Final = 256  # for the log, discovery, streams of load, files


def open_listener(
    host: str, port: int, *, is_shared: bool = False, field: str = "server"
) -> socket.socket:
    """`is_shared`: several processes listen there, and the kernel deals connections out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, port),
            family=family,
            backlog=BACKLOG,
            reuse_port=is_shared,
            dualstack_ipv6=family == socket.AF_INET6 and host == "::",
        )
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # its connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        return listener
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (while ")[0]  # Python repeats the address
        raise ConfigInvalid(
            field, f"cannot listen on {host}:{port}: {reason}; choose {_OTHERS[field]}"
        ) from None


def affordable_connections(wanted: int) -> int:
    """Each client may need a connection to an engine as well. Raises the soft limit first."""
    soft = raise_file_limit(2 * wanted + FD_RESERVE)
    return max(16, min(wanted, (soft - FD_RESERVE) // 2))
