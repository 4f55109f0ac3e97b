"""Processes that decode and prepare pictures and sounds, so that neither the event loop nor a
hostile file holds up anyone else."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from octavo_common.process_tree import stat_fields, ticks_s
from octavo_engine.core.media.prepare_sound import prepare_media
from octavo_engine.core.media.prepared import PREPARED_BYTES, PreparedMedia
from octavo_engine.errors import InvalidRequest, QueueFull, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.core.media.prepare import PreparationResult, PreparedPicture
    from octavo_engine.core.media.prompt import PictureTokens
    from octavo_engine.core.media.spec import MediaSpec
    from octavo_engine.models.vision_config import MediaKind

    Work: TypeAlias = Callable[[bytes, MediaSpec], PreparationResult]

logger = logging.getLogger(__name__)

NUM_WORKERS = 2
TIMEOUT_S = 20.0  # of one picture, waiting for a worker included
LOOK_S = 0.5
HANG_LOOKS = 6  # without computing
_SLICES = 20
_HASHED_AT_ONCE = 1 << 20  # bytes, which take half a millisecond
MAX_WAITING = 256
WORKER_BYTES = 2 << 30  # of address space in a worker


class PictureWorkers:
    """Started with the first picture. A worker that dies, hangs or takes too long takes its pool
    with it; the next picture starts another. A picture at whose side that happened is prepared
    again, alone: which one ends it shows then. What was prepared lately is not decoded again."""

    def __init__(
        self, spec: MediaSpec, tokens: PictureTokens, *, max_images: int | None = None,
        timeout_s: float = TIMEOUT_S, prepared_bytes: int = PREPARED_BYTES,
        work: Work = prepare_media,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.tokens = tokens
        self.max_images = max_images  # of a prompt; None: what the server's limits allow
        self.num_waiting = 0
        self.seconds = 0.0  # that pictures took, waiting included
        self.hang = ""  # why they make no progress, from when that is seen until they do again
        self._timeout_s = timeout_s
        self._work = work
        self._is_closed = False
        self._pool: WorkerPool | None = None
        self._alone = asyncio.Semaphore(NUM_WORKERS)
        self._num_alone = 0  # pictures that are prepared alone, or wait for that
        self._spare: list[WorkerPool] = []  # of one process each, for those that wait
        self._prepared = PreparedMedia(prepared_bytes)

    @property
    def kind(self) -> MediaKind:
        """What they prepare."""
        return self.spec.media.kind

    async def prepare(self, data: bytes, param: str, *, num_pictures: int = 1) -> PreparedPicture:
        """`num_pictures`: in its prompt. Raises RequestError that names `param`."""
        if self.kind == "image" and find_spec("PIL") is None:
            raise RequestError(
                f"{param}: this server cannot decode pictures; its operator must run: "
                "pip install pillow",
                param=param,
                code="not_supported",
            )
        key = (await _digest(data), num_pictures)
        if (known := self._prepared.find(key)) is not None:
            return known
        if self.num_waiting >= MAX_WAITING:
            noun = self.spec.media.noun
            raise QueueFull(f"{MAX_WAITING} {noun} are waiting to be decoded", retry_after_s=1)
        started = time.monotonic()
        self.num_waiting += 1
        try:
            result = await self._run(data, param, self.spec.among(num_pictures))
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self.hang = ""
            self.seconds += time.monotonic() - started
        if result.picture is None:
            raise InvalidRequest(f"{param} {result.problem}", param=param)
        self._prepared.hold(key, result.picture)
        return result.picture

    def close(self) -> None:
        """End the workers, whatever they do, for good."""
        self._is_closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.kill()
        self._end_spare()

    async def _run(self, data: bytes, param: str, spec: MediaSpec) -> PreparationResult:
        try:
            return await self._try(data, spec)
        except TimeoutError:
            problem = f"takes longer than {self._timeout_s:g} s to decode; make it smaller"
        except DecoderLost:
            problem = "cannot be decoded: the process that decodes it ends or hangs over it"
        logger.warning("Pictures: %s %s", param, problem)
        raise InvalidRequest(f"{param} {problem}", param=param)

    async def _try(self, data: bytes, spec: MediaSpec) -> PreparationResult:
        """Raises DecoderLost, TimeoutError."""
        pool = self._pool
        if pool is None or pool.is_over:
            pool = self._pool = WorkerPool(NUM_WORKERS, self._hangs)
        try:
            return await pool.run(self._work, data, spec, self._timeout_s)
        except DecoderLost:
            if self._is_closed:
                raise
        self._num_alone += 1
        try:
            async with self._alone:
                return await self._try_alone(data, spec)
        finally:
            self._num_alone -= 1
            if not self._num_alone:
                self.hang = ""
                self._end_spare()

    async def _try_alone(self, data: bytes, spec: MediaSpec) -> PreparationResult:
        """In a process that has nothing else. Raises DecoderLost, TimeoutError."""
        pool = self._spare.pop() if self._spare else WorkerPool(1, self._hangs)
        try:
            result = await pool.run(self._work, data, spec, self._timeout_s)
        except BaseException:  # of one whose client left, nobody knows what it does
            pool.kill()
            raise
        self._spare.append(pool)
        return result

    def _end_spare(self) -> None:
        while self._spare:
            self._spare.pop().kill()

    def _hangs(self, reason: str) -> None:
        logger.error("Preparing %s hangs: %s; its processes are replaced", self.kind, reason)
        self.hang = reason


class DecoderLost(Exception):
    """The process that had it, or one beside that, has ended."""


class WorkerPool:
    """Processes that prepare what they are given. Once one of them has ended, hangs, or takes too
    long, all of them end, and whoever waits learns of it.

    A process hangs that has work and does not compute: its processor time stands still, and it
    waits for no processor either. Looks are counted: in seconds everything may have stood still.
    """

    def __init__(self, num_workers: int, on_hang: Callable[[str], None]) -> None:
        self.is_over = False
        self._on_hang = on_hang
        self._ages: dict[asyncio.Future[PreparationResult], int] = {}  # looks since each began
        self._watching: asyncio.Task[None] | None = None
        # Spawned: the server has threads, which a fork would copy in the middle of their work.
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(WORKER_BYTES,),
        )

    async def run(
        self, work: Work, data: bytes, spec: MediaSpec, timeout_s: float
    ) -> PreparationResult:
        """Raises DecoderLost, TimeoutError."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, work, data, spec)
        except (BrokenProcessPool, RuntimeError) as error:  # RuntimeError: it has been ended
            self.kill()
            raise DecoderLost from error
        self._ages[future] = 0
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="octavo-media")
        try:
            return await _within(future, timeout_s)
        except (BrokenProcessPool, TimeoutError, DecoderLost) as error:
            self.kill()
            if isinstance(error, TimeoutError):
                raise
            raise DecoderLost from error
        finally:
            self._ages.pop(future, None)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that there are by now."""
        return tuple(self._executor._processes or ())

    def kill(self) -> None:
        """End the processes, whatever they do."""
        if self.is_over:
            return
        self.is_over = True
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def _watch(self) -> None:
        """While there is work."""
        still = _StillProcesses()
        while self._ages and not self.is_over:
            await asyncio.sleep(LOOK_S)
            for future in self._ages:
                self._ages[future] += 1
            looks = still.look(self.pids)
            # So many have had work all the time: as many processes must have computed.
            num_old = min(sum(age >= HANG_LOOKS for age in self._ages.values()), len(looks))
            if num_old and sorted(looks)[num_old - 1] >= HANG_LOOKS and not self.is_over:
                self._on_hang(f"no process has computed for {HANG_LOOKS * LOOK_S:g} s")
                self.kill()
        self._watching = None


class _StillProcesses:
    """How often in a row each process was found not to have computed."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int]] = {}  # seconds used, looks without more of them

    def look(self, pids: Sequence[int]) -> list[int]:
        seen = {}
        for pid in pids:
            fields = stat_fields(f"/proc/{pid}/stat")
            used_s = ticks_s(fields[11:13])
            before_s, looks = self._seen.get(pid, (-1.0, 0))
            is_still = fields and fields[0] != "R" and used_s == before_s
            seen[pid] = (used_s, looks + 1 if is_still else 0)
        self._seen = seen
        return [looks for _, looks in seen.values()]


async def _digest(data: bytes) -> bytes:
    """Large files are not hashed on the event loop."""
    if len(data) <= _HASHED_AT_ONCE:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def _within(work: asyncio.Future[PreparationResult], seconds: float) -> PreparationResult:
    """Raises TimeoutError, DecoderLost. A pause of this whole process, which is no picture's fault,
    counts as one slice of the time."""
    for _ in range(_SLICES):
        done, _pending = await asyncio.wait((work,), timeout=seconds / _SLICES)
        if work.cancelled():  # with the pool that it waited in
            raise DecoderLost
        if done:
            return work.result()
    work.cancel()
    raise TimeoutError


def _begin(num_bytes: int) -> None:
    """In a worker: its memory has a limit, and it ends with the server, however that ends."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was spawned"
    parent.join()
    os._exit(1)
