"""Threads that read long texts: when one counts as hung, and what it must not hold up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from octavo_engine.tokenization.threads import (
    HANGS_AFTER_S,
    INLINE_CHARS,
    LONG_CHARS,
    S_PER_CHAR,
    TextReads,
    ThreadTime,
    hung_text,
    off_loop,
    thread_time,
)

PATIENCE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("num_chars", "allowed_s"),
    [(INLINE_CHARS + 1, HANGS_AFTER_S), (100_000, HANGS_AFTER_S), (1_000_000, 30.0)],
)
def test_a_text_hangs_when_it_takes_longer_than_its_length_explains(num_chars, allowed_s):
    clock = Clock()
    reads = TextReads(clock, lambda _: None)
    seen = []

    def work() -> None:
        for seconds in (0.0, allowed_s - 0.1, 0.2):
            clock.now += seconds
            seen.append(reads.hang())

    reads.read(work, num_chars)
    assert seen[:2] == ["", ""]
    assert seen[2] == f"a text of {num_chars} characters has been read for {allowed_s + 0.1:.1f} s"
    assert reads.hang() == ""  # it has ended after all
    assert allowed_s == pytest.approx(max(HANGS_AFTER_S, S_PER_CHAR * num_chars), rel=0.1)


@pytest.mark.parametrize(
    ("computes", "used_s", "hangs"),
    [(True, 0.1, False), (True, HANGS_AFTER_S / 2, True), (False, 0.1, True)],
    ids=["others have the processors", "it computes on and on", "it waits for something"],
)
def test_a_thread_that_gets_no_processor_does_not_hang(computes, used_s, hangs):
    clock = Clock()
    times = iter([ThreadTime(True, 7.0), ThreadTime(computes, 7.0 + used_s)])
    reads = TextReads(clock, lambda _: next(times))
    seen = []

    def work() -> None:
        clock.now += HANGS_AFTER_S + 1.0
        seen.append(bool(reads.hang()))

    reads.read(work, INLINE_CHARS + 1)
    assert seen == [hangs]


def test_a_threads_time_is_what_it_has_computed():
    thread = threading.get_native_id()
    before = thread_time(thread)
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    after = thread_time(thread)
    assert before is not None and after is not None
    assert after.computes
    assert 0.05 < after.used_s - before.used_s < 0.3
    assert thread_time(-1) is None


def test_a_read_that_fails_is_over():
    clock = Clock()
    reads = TextReads(clock)
    with pytest.raises(ValueError, match="no text"):
        reads.read(lambda: int("no text"), 10_000)
    clock.now += 1000.0
    assert reads.hang() == ""


@pytest.mark.parametrize("num_chars", [INLINE_CHARS + 1, LONG_CHARS + 1])
def test_what_a_thread_raises_comes_to_who_waits(num_chars):
    with pytest.raises(ValueError, match="no text"):
        asyncio.run(off_loop(lambda: int("no text"), num_chars))


def test_a_long_text_is_not_read_when_its_client_has_gone():
    began, end, was_read = threading.Event(), threading.Event(), []

    def first() -> None:
        began.set()
        end.wait(PATIENCE_S)

    async def story() -> None:
        running = asyncio.create_task(off_loop(first, LONG_CHARS + 1))
        waiting = asyncio.create_task(off_loop(lambda: was_read.append("gone"), LONG_CHARS + 1))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        waiting.cancel()
        await asyncio.wait([waiting])
        end.set()
        await running
        await off_loop(lambda: was_read.append("next"), LONG_CHARS + 1)

    asyncio.run(story())
    assert was_read == ["next"]


def test_a_text_in_between_does_not_wait_for_one_that_hangs():
    began, end = threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        end.wait(PATIENCE_S)

    async def story() -> str:
        hanging = [
            asyncio.create_task(off_loop(hangs, size))
            for size in (INLINE_CHARS + 1, LONG_CHARS + 1)
        ]
        await asyncio.to_thread(began.wait, PATIENCE_S)
        found = await off_loop(lambda: "read", INLINE_CHARS + 1)
        assert hung_text() == ""  # so soon
        end.set()
        await asyncio.gather(*hanging)
        return found

    assert asyncio.run(story()) == "read"


HANGS = """
import asyncio, sys, time
from octavo_engine.tokenization.threads import off_loop

async def story():
    waiting = asyncio.create_task(off_loop(lambda: time.sleep(600), int(sys.argv[1])))
    await asyncio.sleep(0.1)
    waiting.cancel()

asyncio.run(story())
"""


@pytest.mark.parametrize("num_chars", [INLINE_CHARS + 1, LONG_CHARS + 1])
def test_a_process_ends_though_a_text_hangs(num_chars):
    command = [sys.executable, "-c", HANGS, str(num_chars)]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
