"""The listening socket, opened before anything heavy is imported: early callers wait."""

from __future__ import annotations

import socket

from octavo_engine.errors import ConfigError

BACKLOG = 2048


def open_port(host: str, port: int) -> socket.socket:
    """Connections wait in it until the server runs. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose others with --host and --port"
        ) from None
