"""Where long texts are read, so that no stream waits for them: short ones at once, longer ones in a
thread, the longest one after the other in a thread of low priority.

No thread can be ended from outside. So each read is noted while it lasts, and `hung_text` says when
one takes far longer than a text of its length may: the server then counts as stalled, and whoever
supervises it starts it again. The threads are daemons: a hung one does not keep the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from octavo_common import failpoints
from octavo_common.heap import can_give_back, give_memory_back
from octavo_common.process_tree import stat_fields, ticks_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

T = TypeVar("T")

INLINE_CHARS = 4096  # the event loop itself reads as many: in less than a millisecond
LONG_CHARS = 1 << 16  # some twenty milliseconds; texts above it leave the others their cores
LARGE_BLOCK_BYTES = 1 << 18  # such blocks of memory are no part of the heap
HANGS_AFTER_S = 3.0  # a text that is read for longer hangs, unless it is long:
S_PER_CHAR = 30e-6  # that may take so much for each, a hundred times what it takes on a free core
LEAST_SHARE = 0.25  # of a core: a thread that computes with less is kept waiting, not hung
_NUM_THREADS = 4  # for texts that are not the longest
_NICENESS = 10
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's <malloc.h>


async def off_loop(work: Callable[[], T], num_chars: int) -> T:
    """The result of `work`, which reads so many characters. Of the longest texts only one is read
    at a time: what reading takes is a hundred times the text, and is given back afterwards."""
    if num_chars <= INLINE_CHARS:
        return work()
    if num_chars <= LONG_CHARS:
        return await asyncio.wrap_future(_texts().submit(work, num_chars))
    return await asyncio.wrap_future(_long_texts().submit(lambda: _tidily(work), num_chars))


def hung_text() -> str:
    """Why a text counts as hung; empty if none does. While it hangs, its thread is lost."""
    return _under_way.hang()


def return_freed_memory() -> None:
    """Make the C library return large blocks as soon as they are freed, in all of this process: it
    would keep more with each one, apart for each thread. Only glibc can do that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and can_give_back():
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def _tidily(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_memory_back()


class ThreadTime(NamedTuple):
    """As Linux counts it."""

    computes: bool  # or waits for a processor to do so
    used_s: float


class TextReads:
    """The reads under way. Threads note their own; anyone may judge."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        time_of: Callable[[int], ThreadTime | None] | None = None,
    ) -> None:
        self._now = now
        self._time_of = time_of or thread_time
        self._reads: dict[int, _Read] = {}  # by thread

    def read(self, work: Callable[[], T], num_chars: int) -> T:
        thread = threading.get_native_id()
        self._reads[thread] = _Read(self._now(), self._time_of(thread), num_chars)
        try:
            if failpoints.IS_ON:
                failpoints.hit("server.text")
            return work()
        finally:
            del self._reads[thread]

    def hang(self) -> str:
        now = self._now()
        for thread, read in tuple(self._reads.items()):
            limit_s = max(HANGS_AFTER_S, S_PER_CHAR * read.num_chars)
            took_s = now - read.since
            if took_s > limit_s and not self._is_starved(thread, read, LEAST_SHARE * limit_s):
                return f"a text of {read.num_chars} characters has been read for {took_s:.1f} s"
        return ""

    def _is_starved(self, thread: int, read: _Read, least_s: float) -> bool:
        """It would go on, but others have the processors."""
        time_now = self._time_of(thread)
        if time_now is None or read.time is None:
            return False
        return time_now.computes and time_now.used_s - read.time.used_s < least_s


class _Read(NamedTuple):
    since: float
    time: ThreadTime | None  # of its thread, then
    num_chars: int


def thread_time(thread: int) -> ThreadTime | None:
    """Of a thread of this process, by its native id. None where the system does not say."""
    fields = stat_fields(f"/proc/self/task/{thread}/stat")
    return ThreadTime(fields[0] == "R", ticks_s(fields[11:13])) if fields else None


class TextThreads:
    """Daemon threads that take texts from one queue, started as texts come. Those of the standard
    library would hold up the end of the process."""

    def __init__(self, name: str, num_threads: int, prepare: Callable[[], None]) -> None:
        self._name = name
        self._num_threads = num_threads
        self._prepare = prepare
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any], int]] = SimpleQueue()
        self._num_started = 0

    def submit(self, work: Callable[[], T], num_chars: int) -> Future[T]:
        """From one thread."""
        future: Future[T] = Future()
        self._queue.put((future, work, num_chars))
        if self._num_started < self._num_threads:
            name = f"{self._name}-{self._num_started}"
            self._num_started += 1
            threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    def _run(self) -> None:
        self._prepare()
        while True:
            self._do(*self._queue.get())

    @staticmethod
    def _do(future: Future[Any], work: Callable[[], Any], num_chars: int) -> None:
        if not future.set_running_or_notify_cancel():
            return  # its client has gone
        try:
            result = _under_way.read(work, num_chars)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


_under_way = TextReads()


@cache
def _texts() -> TextThreads:
    return TextThreads("octavo-texts", _NUM_THREADS, lambda: None)


@cache
def _long_texts() -> TextThreads:
    return TextThreads("octavo-text", 1, _yield_to_others)


def _yield_to_others() -> None:
    """Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
