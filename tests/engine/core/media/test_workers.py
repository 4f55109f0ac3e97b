"""Processes that decode pictures: mutated files end none; one that dies or hangs is replaced."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from octavo_engine.core.media import workers as module
from octavo_engine.core.media.prepare import FORMATS
from octavo_engine.core.media.prompt import PictureTokens
from octavo_engine.core.media.workers import NUM_WORKERS, PictureWorkers
from octavo_engine.errors import InvalidRequest
from octavo_engine.tokenization.text_tokenizer import TextTokenizer
from tests.engine.core.media.test_prepare import mutated, noise, spec
from tests.fakes.deadly_pictures import DEADLY, ENDLESS, prepare
from tests.fakes.process import environment
from tests.fakes.seeing import encoded, tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WORKER_MIB = 700  # one picture of 40 megapixels, decoded and in RGB


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


async def outcome(workers: PictureWorkers, data: bytes) -> str:
    try:
        await workers.prepare(data, "picture")
    except InvalidRequest as error:
        return str(error)
    return "read"


@pytest.mark.slow
def test_mutated_files_end_no_worker() -> None:
    rng = random.Random(3)
    files = [encoded(noise(70, 50), kind) for kind in FORMATS]
    words = TextTokenizer(tokenizer("llava"), where="test")
    workers = PictureWorkers(spec(), PictureTokens(spec().media, words))

    async def scene() -> None:
        assert await outcome(workers, files[0]) == "read"
        assert workers._pool is not None
        started = workers._pool.pids
        outcomes = []
        for _ in range(50):
            batch = [mutated(rng, rng.choice(files)) for _ in range(8)]
            outcomes += await asyncio.gather(*(outcome(workers, data) for data in batch))
        processes = workers._pool.pids
        assert set(started) <= set(processes)
        assert len(processes) <= NUM_WORKERS
        assert max(map(peak_mib, processes)) < MAX_WORKER_MIB
        assert 20 < outcomes.count("read") < 380
        assert not [each for each in outcomes if "the process" in each or "takes longer" in each]

    try:
        asyncio.run(scene())
    finally:
        workers.close()


@pytest.mark.slow
def test_a_pause_of_the_whole_process_is_no_pictures_fault() -> None:
    """As when it was stopped and went on, with its workers."""
    words = TextTokenizer(tokenizer("llava"), where="test")
    workers = PictureWorkers(spec(), PictureTokens(spec().media, words), prepared_bytes=0)
    picture = encoded(noise(700, 500), FORMATS[0])

    async def scene() -> None:
        assert await outcome(workers, picture) == "read"
        workers._timeout_s = 2.0
        waiting = asyncio.create_task(outcome(workers, picture))
        await asyncio.sleep(0)
        time.sleep(2.5)  # noqa: ASYNC251  # everything on the loop waits
        assert await waiting == "read"

    try:
        asyncio.run(scene())
    finally:
        workers.close()


SERVER = """
import asyncio, sys
from octavo_engine.core.media.prompt import PictureTokens
from octavo_engine.core.media.workers import PictureWorkers
from octavo_engine.tokenization.text_tokenizer import TextTokenizer
from tests.engine.core.media.test_prepare import noise, spec
from tests.fakes.process import environment
from tests.fakes.seeing import encoded, tokenizer

async def scene():
    words = TextTokenizer(tokenizer("llava"), where="test")
    workers = PictureWorkers(spec(), PictureTokens(spec().media, words))
    await workers.prepare(encoded(noise(70, 50), "PNG"), "picture")
    print(*workers._pool.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(scene())
"""


@pytest.mark.slow
def test_workers_end_with_a_server_that_is_killed() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        started = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
        assert started
    finally:
        server.kill()
        server.wait()
    server.stdout.close()  # which the workers have as well
    assert not psutil.wait_procs(started, timeout=30)[1]


@contextmanager
def picture_workers(**settings: Any) -> Iterator[PictureWorkers]:
    words = TextTokenizer(tokenizer("llava"), where="test")
    tokens = PictureTokens(spec().media, words)
    workers = PictureWorkers(spec(), tokens, prepared_bytes=0, work=prepare, **settings)
    try:
        yield workers
    finally:
        workers.close()


def send_to_all(workers: PictureWorkers, number: signal.Signals) -> None:
    assert workers._pool is not None
    for pid in workers._pool.pids:
        os.kill(pid, number)


@pytest.mark.slow
def test_a_worker_that_dies_costs_no_picture() -> None:
    async def scene() -> None:
        with picture_workers() as workers:
            picture = encoded(noise(70, 50), "PNG")
            assert await outcome(workers, picture) == "read"
            for _ in range(2):
                send_to_all(workers, signal.SIGKILL)
                several = [outcome(workers, picture) for _ in range(4)]
                assert await asyncio.gather(*several) == ["read"] * 4

    asyncio.run(scene())


@pytest.mark.slow
def test_a_picture_that_its_decoder_dies_of_is_refused_and_costs_no_other() -> None:
    async def scene() -> None:
        with picture_workers() as workers:
            picture = encoded(noise(70, 50), "PNG")
            files = [picture, DEADLY, *[picture] * 20]
            _, refused, *_ = outcomes = await asyncio.gather(
                *(outcome(workers, data) for data in files)
            )
            assert "cannot be decoded: the process that decodes it ends" in refused
            assert outcomes.count("read") == 21
            assert not workers._spare

    asyncio.run(scene())


@pytest.mark.slow
def test_a_worker_that_hangs_is_seen_and_replaced_and_costs_no_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert module.LOOK_S * (module.HANG_LOOKS + 1) < 4.0  # /health knows within five seconds
    monkeypatch.setattr(module, "LOOK_S", 0.1)

    async def scene() -> None:
        with picture_workers() as workers:
            picture = encoded(noise(70, 50), "PNG")
            assert await outcome(workers, picture) == "read"
            send_to_all(workers, signal.SIGSTOP)
            going = asyncio.create_task(outcome(workers, picture))
            seen = set()
            while not going.done():
                seen.add(workers.hang)
                await asyncio.sleep(0.01)
            assert seen == {"", "no process has computed for 0.6 s"}
            assert await going == "read"
            assert workers.hang == ""

    asyncio.run(scene())


@pytest.mark.slow
def test_a_hang_is_over_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    async def scene() -> None:
        with picture_workers() as workers:
            going = asyncio.create_task(outcome(workers, ENDLESS))
            while not workers.hang:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
            going.cancel()  # its client leaves
            await asyncio.wait((going,))
            assert workers.hang == ""
            assert not workers._spare

    asyncio.run(scene())


@pytest.mark.slow
def test_a_picture_over_which_each_worker_hangs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.1)

    async def scene() -> None:
        with picture_workers() as workers:
            assert "ends or hangs over it" in await outcome(workers, ENDLESS)
            assert workers.hang == ""
            assert await outcome(workers, encoded(noise(70, 50), "PNG")) == "read"

    asyncio.run(scene())


@pytest.mark.slow
def test_a_worker_that_only_waits_for_a_picture_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes, and one picture at a time: the other one stands still for long."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)

    async def scene() -> None:
        with picture_workers() as workers:
            picture = encoded(noise(2500, 2500), "PNG")
            started = None
            for _ in range(12):
                assert await outcome(workers, picture) == "read"
                started = started or workers._pool
                assert workers._pool is started and not workers.hang

    asyncio.run(scene())


@pytest.mark.slow
def test_a_picture_that_takes_too_long_is_refused() -> None:
    async def scene() -> None:
        with picture_workers(timeout_s=0.2) as workers:
            assert "takes longer than 0.2 s" in await outcome(workers, ENDLESS)

    asyncio.run(scene())
