"""`octavo up` at work: reads the files, looks at everything in turn, and ends it in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from octavo.local.documents import read_documents
from octavo.local.home import write_whole
from octavo.local.launch import ThreadShare, launch_of
from octavo.local.pool import Pool
from octavo.local.router import LocalRouter
from octavo.local.snapshot import PlatformSnapshot
from octavo_engine.errors import ConfigError
from octavo_operator.routers.poller import RouterDemand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from octavo.local.documents import Documents
    from octavo.local.home import Home
    from octavo.local.watch import DocumentWatch

    class Screen(Protocol):
        """Where it is shown."""

        def notify(self, line: str) -> None: ...
        def show(self, snapshot: PlatformSnapshot) -> None: ...


BUSY_S = 0.2  # between looks while something is under way
CALM_S = 1.0
WARM_S = 0.05  # between questions to the router while a warm engine waits for the first request
FILES_S = 0.5
MISSES = 3  # looks: an editor may take a file away for a moment
STATE_S = 0.5  # between writings of state.json
END_S = 15.0  # beyond the longest drain: then what is left is killed
SAME_WISH_S = 0.5  # Ctrl-C reaches us more than once where a shell passes it on


class PlatformSupervisor:
    """Use `run`; it returns when all has ended."""

    def __init__(
        self,
        home: Home,
        screen: Screen,
        *,
        host: str,
        port: int,
        num_warm: int = 0,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_warm`: engines of each deployment that are loaded beside those that are wanted."""
        self._home = home
        self._num_warm = num_warm
        self._screen = screen
        self._environ = environ
        self._clock = clock
        self._pools: dict[str, Pool] = {}
        self._problem = ""
        self._misses = 0  # looks at the files in a row that failed
        self._demand = RouterDemand(clock)
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_hurried = False
        self._stop_requested_at = float("-inf")
        self._state_written_at = float("-inf")
        self._state_text = ""
        self._disk_problem = ""
        self.router = LocalRouter(
            host, port,
            home=home, environ=environ, demand=self._demand,
            notify=screen.notify, wake=self._changed.set, clock=clock,
        )  # fmt: skip

    def want(self, documents: Documents) -> None:
        """What should run from now on. Raises ConfigError, and then nothing has changed."""
        launches = {
            deployment.pool: launch_of(
                deployment,
                models=self._home.models,
                references=documents.references,
                environ=self._environ,
            )
            for deployment in documents.deployments
        }
        if len({launch.keys for launch in launches.values() if launch.keys}) > 1:
            raise ConfigError(
                "OCTAVO_API_KEY differs between LLMDeployments; one router has one set of keys, so "
                "give all of them the same"
            )
        for kind in documents.skipped:
            self._screen.notify(f"ignored {kind}, which has no meaning outside of a cluster")
        for deployment in documents.deployments:
            launch = launches[deployment.pool]
            pool = self._pools.get(deployment.pool)
            if pool is not None:
                pool.want(deployment, launch)
                continue
            self._pools[deployment.pool] = Pool(
                deployment, launch,
                home=self._home, environ=self._environ, demand=self._demand,
                notify=self._screen.notify, wake=self._changed.set, clock=self._clock,
                num_warm=self._num_warm,
            )  # fmt: skip
        for name in self._pools.keys() - launches.keys():
            if not self._pools[name].is_deleted:
                self._screen.notify(f"{name} is no longer in the files")
                self._pools[name].delete()

    async def run(self, watch: DocumentWatch | None) -> None:
        """Until a signal. Whatever happens, no process is left."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        polling = asyncio.create_task(self._poll(), name="router-state")
        try:
            self.router.write(self._all())
            self.router.start()
            await self._work(watch)
            await self._end()
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling
            self._kill()
            for number in (*numbers, signal.SIGCHLD):
                loop.remove_signal_handler(number)
            self.router.remove_config()
            with suppress(OSError):
                self._home.state_file.unlink(missing_ok=True)

    async def _work(self, watch: DocumentWatch | None) -> None:
        files_at = self._clock()
        while not self._stopping.is_set():
            if watch is not None and self._clock() - files_at >= FILES_S:
                files_at = self._clock()
                self._read(watch)
            self.router.look()
            self._look()
            self._save(lambda: self.router.write(self._all()))
            self._show()
            await self._wait(BUSY_S if self._is_busy else min(CALM_S, FILES_S))

    async def _poll(self) -> None:
        while True:
            await self.router.poll()
            await asyncio.sleep(self._poll_pause_s)

    def _read(self, watch: DocumentWatch) -> None:
        try:
            try:
                texts = watch.read()
            except ConfigError:
                self._misses += 1
                if self._misses < MISSES:
                    return
                raise
            is_back = self._misses >= MISSES
            self._misses = 0
            if texts is None:
                if is_back:
                    self._problem = ""
                return
            self.want(read_documents(texts))
        except ConfigError as error:
            if self._problem != str(error):
                self._problem = str(error)
                self._screen.notify(f"kept the running state: {error}")
            return
        if self._problem:
            self._screen.notify("the files are valid again")
        self._problem = ""

    def _look(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        wanted = max(1, sum(pool.wanted for pool in self._pools.values()))
        warm = sum(pool.num_warm for pool in self._pools.values())  # idle, and with KV caches
        share = ThreadShare(num_threads=max(1, (cores or 1) // wanted), replicas=wanted + warm)
        for pool in self._all():
            pool.look(share)
            if pool.is_gone:
                pool.kill()  # a fetch that is no longer needed
                del self._pools[pool.name]
                self._demand.forget(pool.name)
                self._screen.notify(f"{pool.name} has stopped")

    async def _end(self) -> None:
        """The router first: it accepts no new requests, and lets those in flight finish."""
        self._screen.notify(
            "stopping: requests in flight may finish · press Ctrl-C again to stop at once"
        )
        drains = [pool.deployment.rollout.drain_timeout_s for pool in self._all()]
        deadline = self._clock() + max(drains, default=0.0) + END_S
        self.router.terminate()
        while self.router.is_running and not self._is_late(deadline):
            self._show()
            await self._wait(BUSY_S)
        for pool in self._all():
            pool.leave()
        while self._pools and not self._is_late(deadline):
            self._look()
            self._show()
            if self._pools:
                await self._wait(BUSY_S)
        self._screen.notify("stopped at once" if self._is_hurried else "stopped")

    def _kill(self) -> None:
        self.router.kill()
        for pool in self._all():
            pool.kill()

    def _is_late(self, deadline: float) -> bool:
        return self._is_hurried or self._clock() >= deadline

    def _on_stop(self) -> None:
        now = self._clock()
        if self._stopping.is_set() and now - self._stop_requested_at >= SAME_WISH_S:
            self._is_hurried = True
        if not self._stopping.is_set():
            self._stop_requested_at = now
        self._stopping.set()
        self._changed.set()

    async def _wait(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    @property
    def _is_busy(self) -> bool:
        return self.router.state != "ready" or any(not pool.is_done for pool in self._all())

    @property
    def _poll_pause_s(self) -> float:
        if any(pool.is_asleep and pool.has_warm for pool in self._all()):
            return WARM_S
        return BUSY_S if self._is_busy else CALM_S

    def _all(self) -> list[Pool]:
        return list(self._pools.values())

    def _show(self) -> None:
        snapshot = PlatformSnapshot(
            pid=os.getpid(),
            url=self.router.url,
            router="ending" if self._stopping.is_set() else self.router.state,
            problem=self._problem,
            pools=tuple(pool.row() for pool in self._all()),
        )
        self._screen.show(snapshot)
        text, now = snapshot.to_json(), self._clock()
        if text != self._state_text and now - self._state_written_at >= STATE_S:
            self._state_text, self._state_written_at = text, now
            self._save(lambda: write_whole(self._home.state_file, text))

    def _save(self, write: Callable[[], None]) -> None:
        """A disk that is full ends nothing: what runs goes on, and the next look writes again."""
        try:
            write()
        except OSError as error:
            problem = f"{self._home.path} cannot be written: {error.strerror or error}"
            self._state_text = ""
            if problem != self._disk_problem:
                self._screen.notify(f"{problem}; running engines continue, changes wait")
            self._disk_problem = problem
        else:
            self._disk_problem = ""
