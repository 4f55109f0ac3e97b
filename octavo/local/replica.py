"""One engine of a pool: its process, how far it has come, and its restarts."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING, Any, Literal

from octavo.cli import EXIT_SETTINGS
from octavo.http_client import HttpConnection, ServerAddress, ServerError
from octavo.local.backoff import BackOff
from octavo.local.child import Child, describe_end, octavo_command
from octavo.local.home import write_whole
from octavo.local.launch import engine_environment
from octavo_engine.protocol.loading import read_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo.local.home import Home
    from octavo.local.launch import Launch, ThreadShare
    from octavo_engine.protocol.loading import LoadProgress

# held: its weights are not there yet. waiting: it ended by itself and is started again soon.
# failed: its settings cannot work, so that only others will start it.
State = Literal[
    "held", "starting", "loading", "ready", "stalled", "waiting", "failed", "leaving", "gone"
]

PROBE_S = 0.1  # while it starts; then it is looked at as a pod's probes would
LIVENESS_S = 5.0
PROBE_TIMEOUT_S = 5.0
MAX_MISSES = 3
MAX_SAME_ENDS = 3  # with EXIT_SETTINGS and the same words; a port that was taken has others
GRACE_S = 15.0  # after the drain, as a pod has


class LocalReplica:
    """Its `id` outlives its processes; each process has a port of its own."""

    def __init__(
        self,
        id_: str,
        launch: Launch,
        *,
        home: Home,
        environ: Mapping[str, str],
        notify: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.id = id_
        self.launch = launch
        self.state: State = "held"
        self.progress = 0.0  # of loading
        self.loading: LoadProgress | None = None  # the same in bytes
        self.restarts = 0
        self.detail = ""  # why it is not well, for people
        self.port = 0
        self.log = home.logs / f"{id_}.log"
        self._home = home
        self._environ = environ
        self._notify = notify
        self._wake = wake
        self._clock = clock
        self._child: Child | None = None
        self._probe: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._leaves_by = float("inf")
        self._backoff = BackOff()
        self._killed_for = ""  # why we ended its process ourselves
        self._last_words = ""
        self._num_same_ends = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.port else ""

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    @property
    def is_leaving(self) -> bool:
        return self.state in ("leaving", "gone")

    @property
    def is_coming(self) -> bool:
        """It serves, or will without a pause."""
        return self.state in ("held", "starting", "loading", "ready")

    @property
    def is_listed(self) -> bool:
        """Whether routers should know it. One that leaves reports it itself: it is taken from
        the list when it has gone, and nothing that it still answers is cut off."""
        return self._child is not None and self.state in ("ready", "stalled", "leaving")

    def start(self, share: ThreadShare) -> None:
        if self.is_leaving or self._child is not None:
            return
        self._started_at = self._clock()
        self._killed_for = ""
        self.port = _free_port()
        self.progress, self.loading = 0.0, None
        config = self._home.run / f"{self.id}.toml"
        try:
            write_whole(config, self.launch.config_text(share))
            self._child = Child(
                octavo_command(*self.launch.command_arguments(config, self.port)),
                log=self.log,
                environment=engine_environment(self._environ, self.launch.variables),
            )
        except OSError as error:
            self._ended(f"could not be started: {error.strerror or error}", [])
            return
        self.state = "starting"
        self._probe = asyncio.create_task(self._watch(), name=f"probe-{self.id}")

    def look(self, share: ThreadShare) -> None:
        """Notices an end, a deadline, the end of a pause."""
        now = self._clock()
        if self._child is None:
            if self.state == "waiting" and self._backoff.is_over(now):
                self.restarts += 1
                self.start(share)
            return
        code = self._child.code
        if code is None:
            if self.state == "leaving" and now >= self._leaves_by:
                self._notify(f"{self.id} did not end in time; killed")
                self._child.kill()
            elif self.state in ("starting", "loading") and now >= (
                self._started_at + self.launch.startup_s
            ):
                self._end(f"was not ready within {self.launch.startup_s:g} s")
            return
        child, self._child = self._child, None
        child.kill()  # what it had started, should any of it be left
        self._stop_probe()
        if self.state == "leaving":
            self.state = "gone"
            self._notify(f"{self.id} has left")
            return
        lines = child.last_lines(3)
        if code == EXIT_SETTINGS and self._is_same_end(lines):
            self._failed(lines)
        else:
            self._ended(self._killed_for or describe_end(code), lines)

    def leave(self) -> None:
        """Finish what is under way, then end."""
        if self.is_leaving:
            return
        if self._child is None:
            self.state = "gone"
            return
        self.state = "leaving"
        self._leaves_by = self._clock() + self.launch.drain_s + GRACE_S
        self._stop_probe()
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stop_probe()
        if self._child is not None:
            self._child.kill()

    def _ended(self, why: str, lines: list[str]) -> None:
        now = self._clock()
        pause_s = self._backoff.failed(now, ran_s=now - self._started_at)
        self.state = "waiting"
        self.detail = why + (f": {lines[-1]}" if lines else "")
        self._notify(f"{self.id} ended ({why}); starts again in {pause_s:g} s · {self.log}")
        for line in lines:
            self._notify(f"  {line}")

    def _is_same_end(self, lines: list[str]) -> bool:
        """Whether it has ended so often enough to know that it always will."""
        words = lines[-1] if lines else ""
        self._num_same_ends = self._num_same_ends + 1 if words == self._last_words else 1
        self._last_words = words
        return bool(words) and self._num_same_ends >= MAX_SAME_ENDS

    def _failed(self, lines: list[str]) -> None:
        self.state = "failed"
        self.detail = lines[-1]
        self._notify(
            f"{self.id} cannot start, and is not started again until its file changes or octavo up "
            f"is run anew: {self.detail} · {self.log}"
        )

    def _end(self, why: str) -> None:
        self._killed_for = self.detail = why
        if self._child is not None:
            self._child.kill()

    def _stop_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    async def _watch(self) -> None:
        """Until cancelled: how it comes up, and whether it stays well."""
        while self.state in ("starting", "loading"):
            await asyncio.sleep(PROBE_S)
            body = await self._ask("/ready")
            if body is None:
                continue
            state = body.get("state")
            if state == "loading":
                progress = float(body.get("progress", 0.0))
                if self.state != "loading" or progress != self.progress:
                    self.state, self.progress = "loading", progress
                    self.loading = read_progress(body.get("loading"))
                    self._wake()
            elif state in ("ready", "saturated"):
                self.state, self.detail = "ready", ""
                took_s = self._clock() - self._started_at
                self._notify(f"{self.id} is ready at {self.url} (after {took_s:.1f} s)")
                self._wake()
        misses = 0
        while True:
            await asyncio.sleep(LIVENESS_S)
            body = await self._ask("/ready")
            is_well = body is not None and body.get("state") in ("ready", "saturated", "draining")
            misses = 0 if is_well else misses + 1
            self.state = "ready" if is_well else "stalled"
            if misses >= MAX_MISSES:
                self._end("made no progress")
                return

    async def _ask(self, path: str) -> dict[str, Any] | None:
        """None if nothing answers, or another program does."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                connection = await HttpConnection.connect(ServerAddress.parse(self.url))
                try:
                    body = (await connection.request("GET", path)).json()
                finally:
                    connection.close()
        except (TimeoutError, ServerError, ValueError):
            return None
        return body if isinstance(body, dict) else None


def _free_port() -> int:
    """Nobody holds it for us: an engine that comes too late says so, and gets another one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
