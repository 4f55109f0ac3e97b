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
from typing import TYPE_CHECKING

from octavo_engine.core.media.prepare_sound import prepare_media
from octavo_engine.core.media.prepared import PREPARED_BYTES, PreparedMedia
from octavo_engine.errors import InvalidRequest, QueueFull, RequestError

if TYPE_CHECKING:
    from octavo_engine.core.media.prepare import PreparationResult, PreparedPicture
    from octavo_engine.core.media.prompt import PictureTokens
    from octavo_engine.core.media.spec import MediaSpec
    from octavo_engine.models.vision_config import MediaKind

logger = logging.getLogger(__name__)

NUM_WORKERS = 2
TIMEOUT_S = 20.0  # of one picture, waiting for a worker included
_SLICES = 20
_HASHED_AT_ONCE = 1 << 20  # bytes, which take half a millisecond
MAX_WAITING = 256
WORKER_BYTES = 2 << 30  # of address space in a worker


class PictureWorkers:
    """Started with the first picture. A worker that dies or hangs takes its pool with it; the next
    picture starts another. What was prepared lately is not decoded again."""

    def __init__(
        self, spec: MediaSpec, tokens: PictureTokens, *, max_images: int | None = None,
        timeout_s: float = TIMEOUT_S, prepared_bytes: int = PREPARED_BYTES,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.tokens = tokens
        self.max_images = max_images  # of a prompt; None: what the server's limits allow
        self.num_waiting = 0
        self.seconds = 0.0  # that pictures took, waiting included
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None
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
            self.seconds += time.monotonic() - started
        if result.picture is None:
            raise InvalidRequest(f"{param} {result.problem}", param=param)
        self._prepared.hold(key, result.picture)
        return result.picture

    def close(self) -> None:
        """End the workers, whatever they do."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def _run(self, data: bytes, param: str, spec: MediaSpec) -> PreparationResult:
        pool = self._pool
        if pool is None:
            # Spawned: the server has threads, which a fork would copy in the middle of their work.
            pool = self._pool = ProcessPoolExecutor(
                NUM_WORKERS,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(WORKER_BYTES,),
            )
        work = asyncio.get_running_loop().run_in_executor(pool, prepare_media, data, spec)
        try:
            return await _within(work, self._timeout_s)
        except TimeoutError:
            problem = f"takes longer than {self._timeout_s:g} s to decode; make it smaller"
        except BrokenProcessPool:
            problem = "cannot be decoded: the process that decodes it died; send it again"
        logger.warning("Pictures: %s %s", param, problem)
        if self._pool is pool:
            self.close()
        raise InvalidRequest(f"{param} {problem}", param=param)


async def _digest(data: bytes) -> bytes:
    """Large files are not hashed on the event loop."""
    if len(data) <= _HASHED_AT_ONCE:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def _within(work: asyncio.Future[PreparationResult], seconds: float) -> PreparationResult:
    """Raises TimeoutError. A pause of this whole process, which is no picture's fault, counts as
    one slice of the time."""
    for _ in range(_SLICES):
        done, _pending = await asyncio.wait((work,), timeout=seconds / _SLICES)
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
