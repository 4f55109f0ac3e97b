"""Where long texts are read, so that no stream waits for them: short ones at once, longer ones in a
thread, the longest one after the other in a thread of low priority."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

INLINE_CHARS = 4096  # the event loop itself reads as many: in less than a millisecond
LONG_CHARS = 1 << 16  # some twenty milliseconds; texts above it leave the others their cores
LARGE_BLOCK_BYTES = 1 << 18  # such blocks of memory are no part of the heap
_NICENESS = 10
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's <malloc.h>


async def off_loop(work: Callable[[], T], num_chars: int) -> T:
    """The result of `work`, which reads so many characters. Of the longest texts only one is read
    at a time: what reading takes is a hundred times the text, and is given back afterwards."""
    if num_chars <= INLINE_CHARS:
        return work()
    if num_chars <= LONG_CHARS:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_long_texts(), _tidily, work)


def give_memory_back() -> None:
    """Make the C library return what it keeps for later; only glibc can do that."""
    if (trim := _trim()) is not None:
        trim(0)


def return_freed_memory() -> None:
    """Make the C library return large blocks as soon as they are freed, in all of this process: it
    would keep more with each one, apart for each thread. Only glibc can do that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and _trim() is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def _tidily(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_memory_back()


@cache
def _long_texts() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="octavo-text", initializer=_yield_to_others)


def _yield_to_others() -> None:
    """Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
