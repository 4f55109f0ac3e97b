"""The listening socket, opened before anything heavy is imported: early callers wait."""

from __future__ import annotations

import os
import socket
import stat

from octavo_engine.errors import ConfigError

BACKLOG = 2048
# The kernel takes megabytes for a client that does not read, all of which an engine would compute
# before it notices. With this bound on what the client has not been sent, it notices at once.
UNSENT_BYTES = 64 * 2**10


def open_unix_socket(path: str) -> socket.socket:
    """Takes the place of a socket that no process listens on any more. Raises ConfigError."""
    try:
        _remove_dead(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o660)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def _remove_dead(path: str) -> None:
    if not os.path.exists(path):
        return
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConfigError(f"--uds {path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"--uds {path}: another server listens there")


def open_port(host: str, port: int, flags: str = "--host and --port") -> socket.socket:
    """Connections wait in it until the server runs. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # its connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        return listener
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[
            0
        ]  # Python repeats the address
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose others with {flags}"
        ) from None
