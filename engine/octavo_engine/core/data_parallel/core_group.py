"""Several engine cores for a caller without an event loop: what `LLM` drives with several of them.

The cores are those that the server has behind one port, with the same client. Its event loop runs
in a thread of its own; messages reach it by `call_soon_threadsafe`, and what the cores report comes
back through a queue. All else here belongs to the caller's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from octavo_engine.core.connect import choose_connect, connect_cores
from octavo_engine.core.interrupt import deferred_interrupt
from octavo_engine.core.process import wire
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import EngineDead, InvalidRequest, WorkerLost
from octavo_engine.state.outputs import EngineStats, ProfileWritten, StepOutput
from octavo_engine.state.request import EngineRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from pathlib import Path

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.connect import Connect
    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.core.process.client import EngineClient
    from octavo_engine.errors import RequestError
    from octavo_engine.profile import StepProfile
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_engine.state.pooling import PoolingRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S = 0.1  # in which the caller sees Ctrl-C, progress, and a core that is lost
_ONE_LIFE = Timing(max_fast_failures=1)  # what a lost core was computing cannot be had again
# Sequences at the cores for each that can run: others stay here, and go where there is less to do.
_AHEAD = 2


class _Refused(NamedTuple):
    request_id: str
    error: RequestError


class _Inbox:
    """The Listener of the cores. It does not know the group, which can be let go of."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[StepOutput | _Refused | EngineDead] = SimpleQueue()

    def on_step(self, step: StepOutput) -> None:
        self.reports.put(step)

    def on_refused(self, sequence_id: str, error: RequestError) -> None:
        self.reports.put(_Refused(sequence_id, error))

    def on_lost(self, error: RequestError) -> None:
        self.reports.put(EngineDead(error.message))


class _LoopThread:
    """An event loop in a thread, and the client of the cores, which lives on it."""

    def __init__(self, config: EngineConfig, inbox: _Inbox, connect: Connect) -> None:
        self._inbox = inbox
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="octavo-cores", daemon=True
        )
        self._thread.start()
        self._client: EngineClient | None = None
        try:
            self._client = self.run(self._make(config, connect))
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def ready(
        self, progress: Callable[[int, int], None] | None, interrupted: Callable[[], bool]
    ) -> ModelInfo:
        """Wait for all cores. Raises the ConfigError or ModelError that ended one's start, and
        KeyboardInterrupt."""
        assert self._client is not None
        loading = asyncio.run_coroutine_threadsafe(self._client.ready(), self._loop)
        while wait([loading], _TICK_S).not_done:
            if interrupted():
                raise KeyboardInterrupt
            known = self.health().loading
            if progress is not None and known is not None:
                progress(known.bytes_done, known.bytes_total)
        return loading.result()

    def health(self) -> CoreHealth:
        return self.run(self._health())

    def send(self, message: wire.ToEngine, request_ids: Sequence[str] = ()) -> None:
        """What cannot be sent is refused, like what the cores do not take."""
        self._loop.call_soon_threadsafe(self._send, message, request_ids)

    def close(self) -> None:
        """End the cores, then the thread. A second call does nothing."""
        if threading.current_thread() is self._thread:  # it may be what collects garbage
            threading.Thread(target=self.close, name="octavo-cores-close").start()
            return
        if self._loop.is_closed():
            return
        try:
            if self._client is not None:
                self.run(self._stop(self._client.stop()))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # ── on the event loop ──

    async def _make(self, config: EngineConfig, connect: Connect) -> EngineClient:
        return connect_cores(config, self._inbox, connect)

    async def _health(self) -> CoreHealth:
        assert self._client is not None
        return self._client.health()

    async def _stop(self, stop: Awaitable[None]) -> None:
        await stop
        await asyncio.get_running_loop().shutdown_default_executor()

    def _send(self, message: wire.ToEngine, request_ids: Sequence[str]) -> None:
        assert self._client is not None
        try:
            self._client.send(message)
        except (UnicodeEncodeError, wire.WireError) as error:
            for request_id in request_ids:
                refusal = InvalidRequest(f"the request cannot be sent to the engine: {error}")
                self._inbox.on_refused(request_id, refusal)


class CoreGroup:
    """What `LLM` needs of a CoreEngine, over several cores.

    A core that is lost ends them all: the call at hand, and every later one, raises WorkerLost.
    """

    def __init__(self, config: EngineConfig, connect: Connect | None = None) -> None:
        self.profile: _RemoteProfile | None = None
        self._inbox = _Inbox()
        self._cores = _LoopThread(
            config, self._inbox, connect or choose_connect(config, timing=_ONE_LIFE)
        )
        self._finalizer = weakref.finalize(self, self._cores.close)  # where it is never closed
        self._finalizer.atexit = False  # cores end by themselves when the socket to them closes
        self._max_placed = _AHEAD * config.max_num_seqs
        self._unplaced: OrderedDict[str, EngineRequest | PoolingRequest] = OrderedDict()
        self._placed: set[str] = set()  # and adapters that are being loaded
        self._refused: list[tuple[str, RequestError]] = []
        self._stats = EngineStats()
        self._lost = ""  # why there are no cores any more

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
        connect: Connect | None = None,
    ) -> tuple[CoreGroup, ModelInfo]:
        """Load all cores. Raises ConfigError or ModelError; then nothing is left behind."""
        with deferred_interrupt() as interrupted:
            group = cls(config, connect)
            try:
                info = group._cores.ready(progress, interrupted)
            except BaseException:
                group.close()
                raise
        if interrupted():  # since the last look
            group.close()
            raise KeyboardInterrupt
        return group, info

    @property
    def has_work(self) -> bool:
        return bool(self._unplaced or self._placed or self._refused)

    def add(self, request: EngineRequest) -> None:
        self._begin()
        self._unplaced[request.request_id] = request

    def add_pooling(self, requests: Sequence[PoolingRequest]) -> None:
        self._begin()
        for request in requests:
            self._unplaced[request.request_id] = request

    def load_adapter(self, load_id: str, path: str, *, is_pinned: bool = False) -> None:
        self._begin()
        self._placed.add(load_id)
        self._cores.send(wire.LoadAdapter(load_id, path, is_pinned))

    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None:
        self._unplaced.pop(request_id, None)
        if request_id in self._placed:
            self._placed.discard(request_id)
            self._send(wire.Abort([request_id], has_left))
        return None

    def step(self) -> StepOutput:
        """What one core reports next; nothing, where none does for a moment."""
        self._place()
        report = self._next_report()
        match report:
            case StepOutput():
                return self._note(report)
            case _Refused(request_id, EngineDead() as error):
                self._lose(error.message)
            case _Refused(request_id, error):
                self._placed.discard(request_id)
                self._refused.append((request_id, error))
            case EngineDead():
                self._lose(report.message)
        return StepOutput()

    def report(self, outputs: list[SequenceOutput]) -> StepOutput:
        return StepOutput(outputs=outputs, stats=self._stats)

    def take_refused(self) -> list[tuple[str, RequestError]]:
        refused, self._refused = self._refused, []
        return refused

    def record(self, profile: StepProfile | None) -> None:
        """Each core makes a recording of its own."""
        if profile is not None:
            self._begin()
            self._send(wire.ProfileCommand(on=True))
        self.profile = None if profile is None else _RemoteProfile(self)

    def write_profile(self, path: str) -> ProfileWritten:
        self._begin()
        self._send(wire.ProfileCommand(on=False, path=path))
        while True:
            written = self.step().profile
            if written is not None:
                return written

    def reset_prefix_cache(self) -> bool:
        self._send(wire.ResetPrefixCache())
        return not self.has_work

    def sleep(self, *, on: bool, level: int = 1) -> None:
        self._begin()
        self._send(wire.SleepCommand(on, level))

    def close(self) -> None:
        """End all cores. A second call does nothing."""
        self._finalizer()

    # ── inside ──

    def _begin(self) -> None:
        """Raises WorkerLost where a core was lost while nothing was computed."""
        if self._lost:
            raise WorkerLost(self._lost)
        if not self.has_work:
            self._check_health()

    def _check_health(self) -> None:
        health = self._cores.health()
        if health.state == "dead":
            self._lose(health.reason)

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        self._unplaced.clear()
        self._placed.clear()
        self.close()
        raise WorkerLost(reason)

    def _send(self, message: wire.ToEngine) -> None:
        if self._finalizer.alive:
            self._cores.send(message)

    def _place(self) -> None:
        """Hand out what waits here, the answers to one prompt together."""
        while self._unplaced and len(self._placed) < self._max_placed:
            request_id, request = self._unplaced.popitem(last=False)
            self._placed.add(request_id)
            if not isinstance(request, EngineRequest):
                self._cores.send(wire.AddPooling([request]), [request_id])
                continue
            answers = [request]
            while request.group and self._is_next_of(request.group):
                _, other = self._unplaced.popitem(last=False)
                assert isinstance(other, EngineRequest)
                answers.append(other)
            ids = [answer.request_id for answer in answers]
            self._placed.update(ids)
            self._cores.send(wire.add_answers(answers), ids)

    def _is_next_of(self, group: str) -> bool:
        following = next(iter(self._unplaced.values()), None)
        return isinstance(following, EngineRequest) and following.group == group

    def _next_report(self) -> StepOutput | _Refused | EngineDead | None:
        try:
            return self._inbox.reports.get(timeout=_TICK_S)
        except Empty:
            self._check_health()
            return None

    def _note(self, step: StepOutput) -> StepOutput:
        for output in step.outputs:
            if output.finish_reason is not None:
                self._placed.discard(output.request_id)
        self._placed.difference_update(pooled.request_id for pooled in step.pooled)
        self._placed.difference_update(loaded.load_id for loaded in step.adapters)
        self._stats = step.stats or self._stats
        return step


class _RemoteProfile:
    """A recording that the cores make."""

    def __init__(self, group: CoreGroup) -> None:
        self._group = group

    def write(self, path: str | Path) -> int:
        """How many events the files hold, one of each core. Raises InvalidRequest."""
        written = self._group.write_profile(str(path))
        if written.error is not None:
            raise InvalidRequest(written.error)
        return written.events
