"""The processes of ranks 1 and above: started, watched, and ended by rank 0.

All that they share is memory without a name, which the system frees with the last process. A rank's
socket closes when it dies, which is seen at once; ours closes when we die, which ends the rank.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

from octavo_common.logs import format_in_use
from octavo_engine.errors import ConfigError, ModelError, OctavoError, WorkerLost
from octavo_engine.executor import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "octavo_engine.executor.worker")
_END_S = 5.0  # for a rank to end once its socket is closed
_STARTUP_ERRORS: dict[str, type[OctavoError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError)
}


class RankProcesses:
    """Ranks 1 to size - 1. `on_lost` is called once, on another thread, when one has ended."""

    def __init__(
        self,
        config: EngineConfig,
        patience_s: float,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        size = config.num_ranks
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"{config.ranks_flag} needs Linux, for memory to share")
        self.config = config
        self.size = size
        self.patience_s = patience_s
        self.memory_file = os.memfd_create("octavo-ranks")
        self.ring_file = os.memfd_create("octavo-ring")
        # Between each stage and the next.
        self.row_files = [
            os.memfd_create("octavo-rows") for _ in range(1, config.pipeline_parallel_size)
        ]
        self._heard = [0] * size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lost: WorkerLost | None = None
        self.on_lost: Callable[[int, WorkerLost], None] | None = None
        self._connections: list[Connection] = []
        self._replies: SimpleQueue[messages.FromWorker | None] = SimpleQueue()  # None: one is lost
        self._is_closed = False
        try:
            for _ in range(1, size):
                self._spawn(command)
            level = logging.getLogger("octavo_engine").getEffectiveLevel()
            for rank, connection in enumerate(self._connections, start=1):
                start = messages.StartWorker(config, rank, size, patience_s, level, format_in_use())
                messages.send(connection, start)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._watcher.start()

    def heard(self) -> list[int]:
        """How many messages came from each rank; of rank 0 none do."""
        return list(self._heard)

    def send(self, message: messages.ToWorker) -> None:
        """To all ranks. One that is gone is noticed by who waits for its reply."""
        for connection in self._connections:
            try:
                messages.send(connection, message)
            except OSError:
                continue

    def expect(self, kind: type[messages.FromWorker]) -> None:
        """Wait until every rank has said so. Raises what ended one of them instead."""
        for _ in self._connections:
            reply = self._replies.get()
            if isinstance(reply, messages.WorkerFailed):
                raise _STARTUP_ERRORS.get(reply.kind, OctavoError)(reply.message)
            if reply is None:
                assert self.lost is not None
                raise self.lost
            assert isinstance(reply, kind)

    def close(self) -> None:
        """End all of them. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._connections:
            _shut(connection)
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # stopped, as a rule
                process.kill()
                process.wait()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        for connection in self._connections:
            connection.close()
        os.close(self.memory_file)
        os.close(self.ring_file)
        for file in self.row_files:
            os.close(file)

    def _spawn(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        files = (theirs.fileno(), self.memory_file, self.ring_file, *self.row_files)
        names = ("--socket", "--memory", "--ring", *("--rows" for _ in self.row_files))
        arguments = zip(names, map(str, files), strict=True)
        self._connections.append(Connection(ours.detach()))
        with theirs:
            process = subprocess.Popen(
                [*command, *(word for pair in arguments for word in pair)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
            )
        self.processes.append(process)

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in enumerate(self._connections, start=1)}
        while ranks:
            for ready in wait(list(ranks)):
                assert isinstance(ready, Connection)
                try:
                    reply = messages.receive(ready, messages.FROM_WORKER)
                except (EOFError, OSError):
                    self._lose(ranks.pop(ready))
                    continue
                except messages.BrokenMessage as error:
                    rank = ranks.pop(ready)
                    self.processes[rank - 1].kill()
                    self._lose(rank, f"was killed, since it sent {error}")
                    continue
                self._heard[ranks[ready]] += 1
                if not isinstance(reply, messages.WorkerAlive):
                    self._replies.put(reply)

    def _lose(self, rank: int, how: str = "") -> None:
        if self._is_closed:
            return
        error = WorkerLost(f"rank {rank} of {self.size} {how or _ending(self.processes[rank - 1])}")
        if self.lost is None:
            self.lost = error
            logger.error("Lost a worker: %s", error)
            if self.on_lost is not None:
                self.on_lost(rank, error)
        self._replies.put(None)


def _shut(connection: Connection) -> None:
    """Both ends read its end; the descriptor stays ours until nobody waits for it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone already
            return


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (is the memory limit too small?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
