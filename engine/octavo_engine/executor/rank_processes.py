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
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo_common.logs import format_in_use
from octavo_engine.backends.rank_devices import environment_of
from octavo_engine.errors import ConfigError, ModelError, OctavoError, WorkerLost
from octavo_engine.executor import messages
from octavo_engine.executor.stage_counts import StageCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "octavo_engine.executor.worker")
_END_S = 5.0  # for a rank to end once its socket is closed
_LOOK_S = 0.25  # so often a wait for an answer looks whether all ranks are there
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
        self.stage_counts = StageCounts(size)
        self.processes: list[RankHandle] = []
        self.lost: WorkerLost | None = None
        self.on_lost: Callable[[int, WorkerLost], None] | None = None
        self._connections: list[Connection] = []
        self._replies: SimpleQueue[messages.FromWorker | None] = SimpleQueue()  # None: one is lost
        self._is_closed = False
        try:
            self._start(command)
            level = logging.getLogger("octavo_engine").getEffectiveLevel()
            for rank, connection in enumerate(self._connections, start=1):
                start = messages.StartWorker(
                    config, rank, size, (rank, size), patience_s, level, format_in_use()
                )
                messages.send(connection, start)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._watcher.start()

    def heard(self) -> list[int]:
        """How many messages came from each rank; of rank 0 none do."""
        return list(self._heard)

    def name_of(self, rank: int) -> str:
        """Of a rank above 0, for people."""
        host = self.processes[rank - 1].host
        return f"rank {rank} of {self.size}" + (f" on {host}" if host else "")

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

    def answers(self, number: int) -> list[messages.AdapterPacked]:
        """What each rank says to PackAdapter of that number. Raises WorkerLost when one ends, or
        when nothing is heard of one for `patience_s`: reading a large adapter may take longer."""
        found: list[messages.AdapterPacked] = []
        heard, moments = self.heard(), 0
        while len(found) < self.size - 1:
            if self.lost is not None:
                raise self.lost
            if self._is_closed:
                raise WorkerLost("the engine was closed meanwhile")
            try:
                reply = self._replies.get(timeout=_LOOK_S)
            except Empty:
                # Moments count, not the clock: this process may have been stopped itself.
                moments += 1
                if moments * _LOOK_S >= self.patience_s:
                    self._check_heard(heard)
                    heard, moments = self.heard(), 0
                continue
            # One to an earlier number comes from a rank that was given up.
            if isinstance(reply, messages.AdapterPacked) and reply.number == number:
                found.append(reply)
        return found

    def _check_heard(self, before: list[int]) -> None:
        """Raises WorkerLost where nothing came from a rank since."""
        for rank in range(1, self.size):
            if self._heard[rank] == before[rank]:
                raise WorkerLost(
                    f"{self.name_of(rank)} hangs: nothing was heard of it for "
                    f"{self.patience_s:.0f} s"
                )

    def close(self) -> None:
        """End all of them. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._connections:
            shut(connection)
        for process in self.processes:
            process.end()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        for connection in self._connections:
            connection.close()
        os.close(self.memory_file)
        os.close(self.ring_file)
        for file in self.row_files:
            os.close(file)

    def _start(self, command: Sequence[str]) -> None:
        """All ranks, in their order, with their connections."""
        files = SharedFiles(self.memory_file, self.ring_file, self.row_files)
        for rank in range(1, self.size):
            environment = environment_of(rank, self.config)
            process, connection = spawn(command, files, environment)
            self.processes.append(process)
            self._connections.append(connection)

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
                if isinstance(reply, messages.ExpertCounts):
                    self.stage_counts.put(ranks[ready], reply)
                elif not isinstance(reply, messages.WorkerAlive):
                    self._replies.put(reply)

    def _lose(self, rank: int, how: str = "") -> None:
        if self._is_closed:
            return
        error = WorkerLost(f"{self.name_of(rank)} {how or self.processes[rank - 1].ending()}")
        if self.lost is None:
            self.lost = error
            logger.error("Lost a worker: %s", error)
            if self.on_lost is not None:
                self.on_lost(rank, error)
        self._replies.put(None)


class RankHandle(Protocol):
    """What ends a rank, and knows how it ended."""

    @property
    def host(self) -> str:
        """Where it is; empty: here."""

    def kill(self) -> None: ...

    def end(self) -> None:
        """Its connection is closed: wait until it has ended, and kill it if it does not."""

    def ending(self) -> str:
        """How it ended, to be said of it; waits a moment for that."""


class SharedFiles(NamedTuple):
    """Memory that ranks share."""

    memory: int
    ring: int
    rows: Sequence[int]


class RankProcess:
    """A rank on this host."""

    host = ""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen

    def kill(self) -> None:
        self.popen.kill()

    def end(self) -> None:
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:  # stopped, as a rule
            self.popen.kill()
            self.popen.wait()

    def ending(self) -> str:
        try:
            code = self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (is the memory limit too small?)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


def spawn(
    command: Sequence[str], files: SharedFiles, environment: Mapping[str, str] | None = None
) -> tuple[RankProcess, Connection]:
    """A rank's process, and our end of its socket; None: it has our environment."""
    ours, theirs = socket.socketpair()
    shared = (theirs.fileno(), files.memory, files.ring, *files.rows)
    names = ("--socket", "--memory", "--ring", *("--rows" for _ in files.rows))
    arguments = zip(names, map(str, shared), strict=True)
    with theirs:
        popen = subprocess.Popen(
            [*command, *(word for pair in arguments for word in pair)],
            pass_fds=shared,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    return RankProcess(popen), Connection(ours.detach())


def shut(connection: Connection) -> None:
    """Both ends read its end; the descriptor stays ours until nobody waits for it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone already
            return
