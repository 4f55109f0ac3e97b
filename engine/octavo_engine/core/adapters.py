"""Requests that wait for their LoRA adapter to be read, and the adapters in the host's memory."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import InvalidRequest, ModelError, ModelUnknown, RequestError
from octavo_engine.grammar.buckets import SECONDS_BUCKETS
from octavo_engine.state.adapter import AdapterLoaded, HeldAdapter
from octavo_engine.state.outputs import SequenceOutput
from octavo_engine.weights.adapter import AdapterMissing, read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from octavo_engine.state.adapter import PackedAdapter
    from octavo_engine.state.outputs import EngineStats
    from octavo_engine.state.request import EngineRequest
    from octavo_engine.weights.adapter import AdapterFiles

logger = logging.getLogger(__name__)

ADAPTER_NOT_FOUND = "adapter_not_found"
PREPARE_AFTER_S = 0.2


class _Read(NamedTuple):
    """What came of reading an adapter in the thread."""

    adapter: HeldAdapter | None
    error: RequestError | None
    seconds: float


class _Load(NamedTuple):
    """A load command under way."""

    reading: Future[_Read]
    is_pinned: bool


class SettledAdapters(NamedTuple):
    """What came of requests and load commands since the last look."""

    ready: list[tuple[EngineRequest, HeldAdapter]]
    refused: list[tuple[str, RequestError]]  # by request id, or the id of a load command
    finished: list[SequenceOutput]  # their deadline passed
    loaded: list[AdapterLoaded]


class AdapterQueue:
    """Between a request's arrival and its place in line. The engine's thread owns it.

    Adapters stay in the host's memory until more than `max_held` are there; then the one goes that
    no request wanted for longest. A request whose adapter went waits until it is read again.
    Sequences keep theirs, whatever becomes of it here.
    """

    def __init__(
        self,
        pack: Callable[[AdapterFiles], PackedAdapter],
        *,
        max_held: int,
        max_rank: int,
        expect: Callable[[PackedAdapter], None] | None = None,
        prepare: Callable[[], None] | None = None,
        prepare_after_s: float = PREPARE_AFTER_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expect` is called for each request whose adapter is in memory; `prepare`, in the
        thread, once nothing was to be read for a moment after a load. `wake` may be set: it is
        called, in a thread, when something was read."""
        self.wake: Callable[[], None] | None = None
        self._pack = pack
        self._expect = expect
        self._prepare = prepare
        self._prepare_after_s = prepare_after_s
        self._is_wanted = threading.Event()  # something else is to be read
        self._max_held = max_held
        self._max_rank = max_rank
        self._now = now
        self._held: OrderedDict[str, HeldAdapter] = OrderedDict()  # by digest, by last use
        self._pinned: set[str] = set()
        self._threads = ThreadPoolExecutor(1, "octavo-adapters")
        self._readings: dict[str, Future[_Read]] = {}  # for requests, by path
        self._waiting: dict[str, tuple[EngineRequest, Future[_Read]]] = {}
        self._loads: dict[str, _Load] = {}
        self._counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self._seconds = 0.0
        self._failures = 0

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._loads)

    def load(self, load_id: str, path: str, *, is_pinned: bool = False) -> None:
        """Read an adapter, even if it is there: its files may have changed."""
        self._loads[load_id] = _Load(self._start(path), is_pinned)

    def unload(self, digest: str) -> None:
        """Forget it, unless another name needs it: then it is read again."""
        self._pinned.discard(digest)
        self._held.pop(digest, None)

    def submit(self, request: EngineRequest) -> HeldAdapter | None:
        """Its adapter if that is in memory; otherwise the request waits here."""
        ref = request.adapter
        assert ref is not None
        self._settle_readings()  # one that nobody waits for any more says nothing of files now
        held = self._held.get(ref.digest)
        if held is not None:
            self._held.move_to_end(ref.digest)
            if self._expect is not None:
                self._expect(held.packed)
            return held
        if request.request_id in self._waiting:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        reading = self._readings.get(ref.path)
        if reading is None:
            reading = self._readings[ref.path] = self._start(ref.path)
        self._waiting[request.request_id] = (request, reading)
        return None

    def settle(self) -> SettledAdapters:
        """The requests that need not wait any longer, and the load commands that are done."""
        settled = SettledAdapters([], [], [], [])
        for load_id, load in list(self._loads.items()):
            if load.reading.done():
                del self._loads[load_id]
                self._settle_load(load_id, load, settled)
        self._settle_readings()
        self._settle_requests(settled)
        return settled

    def abort(self, request_id: str) -> SequenceOutput | None:
        """Forget one that waits; its adapter is read all the same."""
        if self._waiting.pop(request_id, None) is None:
            return None
        return SequenceOutput(request_id=request_id, finish_reason="abort")

    def add_stats(self, stats: EngineStats) -> None:
        names = {request.adapter.name for request, _ in self._waiting.values() if request.adapter}
        stats.num_waiting += len(self._waiting)
        stats.num_waiting_adapter = len(self._waiting)
        stats.waiting_adapters = sorted(names.union(stats.waiting_adapters))
        stats.num_adapters_held = len(self._held)
        stats.adapter_load_counts = list(self._counts)
        stats.adapter_load_seconds = self._seconds
        stats.adapter_load_failures = self._failures

    def wait(self, timeout_s: float) -> None:
        """Sleep until something was read, for a caller that has nothing else to do."""
        readings = [reading for _, reading in self._waiting.values()]
        readings += [load.reading for load in self._loads.values()]
        wait(readings, timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        self._is_wanted.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._held.clear()

    def _settle_load(self, load_id: str, load: _Load, settled: SettledAdapters) -> None:
        adapter, error, seconds = load.reading.result()
        if adapter is None:
            assert error is not None
            self._count(seconds, failed=True)
            settled.refused.append((load_id, error))
            return
        self._count(seconds)
        if load.is_pinned:
            self._pinned.add(adapter.digest)
        self._hold(adapter)
        settled.loaded.append(
            AdapterLoaded(load_id, adapter.digest, adapter.rank, adapter.num_bytes, seconds)
        )

    def _settle_readings(self) -> None:
        """Hold what was read for requests, whether they still wait or not."""
        for path, reading in list(self._readings.items()):
            if reading.done():
                del self._readings[path]
                adapter, _, seconds = reading.result()
                self._count(seconds, failed=adapter is None)
                if adapter is not None:
                    self._hold(adapter)

    def _settle_requests(self, settled: SettledAdapters) -> None:
        now = self._now()
        for request_id, (request, reading) in list(self._waiting.items()):
            if reading.done():
                self._settle_request(request, reading.result(), settled)
            elif request.deadline_at is not None and now >= request.deadline_at:
                output = SequenceOutput(request_id=request_id, finish_reason="deadline")
                settled.finished.append(output)
            else:
                continue
            del self._waiting[request_id]

    def _settle_request(
        self, request: EngineRequest, read: _Read, settled: SettledAdapters
    ) -> None:
        ref = request.adapter
        assert ref is not None
        error = read.error
        if read.adapter is not None and read.adapter.digest == ref.digest:
            settled.ready.append((request, read.adapter))
            return
        if error is None:
            problem = f"the files in {ref.path} are others than when it was loaded; load it again"
        else:
            problem = error.message
        message = f"the adapter {ref.name} cannot be read: {problem}"
        settled.refused.append((request.request_id, InvalidRequest(message, param="model")))

    def _hold(self, adapter: HeldAdapter) -> None:
        """In place of one of equal content, which may be in use: both are right."""
        self._held[adapter.digest] = adapter
        self._held.move_to_end(adapter.digest)
        for digest in list(self._held):
            if len(self._held) <= self._max_held:
                return
            if digest not in self._pinned and digest != adapter.digest:
                del self._held[digest]

    def _start(self, path: str) -> Future[_Read]:
        self._is_wanted.set()
        reading = self._threads.submit(self._read, path)
        reading.add_done_callback(self._when_read)
        return reading

    def _when_read(self, _: Future[_Read]) -> None:
        if self.wake is not None:
            self.wake()

    def _read(self, path: str) -> _Read:
        """In the thread."""
        self._is_wanted.clear()
        started = time.monotonic()
        try:
            files = read_adapter(path, max_rank=self._max_rank)
            packed = self._pack(files)
            num_bytes = sum(p.down.data.nbytes + p.up.data.nbytes for p in files.parts.values())
            adapter = HeldAdapter(files.digest, files.rank, num_bytes, packed)
            self._prepare_next()
            return _Read(adapter, None, time.monotonic() - started)
        except AdapterMissing as missing:
            error: RequestError = ModelUnknown(
                str(missing), param="lora_path", code=ADAPTER_NOT_FOUND
            )
        except (ModelError, MemoryError) as problem:
            error = InvalidRequest(str(problem), param="lora_path")
        except Exception as problem:  # it must not end the thread, nor the requests of others
            logger.exception("Could not read an adapter")
            error = InvalidRequest(f"{path} cannot be read: {problem}", param="lora_path")
        return _Read(None, error, time.monotonic() - started)

    def _prepare_next(self) -> None:
        """After this load, and not beside the first steps with its adapter: they need all
        processors."""
        prepare = self._prepare
        if prepare is None:
            return

        def run() -> None:
            if not self._is_wanted.wait(self._prepare_after_s):
                prepare()

        with suppress(RuntimeError):  # closed meanwhile
            self._threads.submit(run)

    def _count(self, seconds: float, *, failed: bool = False) -> None:
        if failed:
            self._failures += 1
            return
        self._counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self._seconds += seconds
