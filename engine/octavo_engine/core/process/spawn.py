"""Starts the process of an engine core; its configuration may follow later, over the socket.

A server starts the core before it imports its own modules, so that both import at once. Whoever
drops a core closes its socket, and the core ends.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.config import EngineConfig

CORE_COMMAND = (sys.executable, "-m", "octavo_engine.core.process.child")


class SpawnedCore(NamedTuple):
    """It imports what it needs, and waits for its configuration."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def drop(self) -> None:
        """Nobody will configure it, or its end was seen: then this does nothing."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn_core(
    command: Sequence[str] = CORE_COMMAND, expert_file: int | None = None
) -> SpawnedCore:
    """Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        files, more = [theirs.fileno()], []
        if expert_file is not None:
            files.append(expert_file)
            more = ["--expert-file", str(expert_file)]
        try:
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno()), *more],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
    return SpawnedCore(process, ours)


def spawn_ahead(config: EngineConfig) -> SpawnedCore | None:
    """The core of these settings, if it is one process: the simulator shares the server's, and
    several cores are started by who knows their shares. Raises OSError."""
    if config.device == "sim" or config.data_parallel_size > 1:
        return None
    return spawn_core()
