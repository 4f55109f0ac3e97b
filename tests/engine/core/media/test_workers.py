"""Mutated picture files through the processes that decode: none dies, hangs or grows."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo_engine.core.media.prepare import FORMATS
from octavo_engine.core.media.prompt import PictureTokens
from octavo_engine.core.media.workers import NUM_WORKERS, PictureWorkers
from octavo_engine.errors import InvalidRequest
from octavo_engine.tokenization.text_tokenizer import TextTokenizer
from tests.engine.core.media.test_prepare import mutated, noise, spec
from tests.fakes.process import environment
from tests.fakes.seeing import encoded, tokenizer

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
        started = dict(workers._pool._processes)
        outcomes = []
        for _ in range(50):
            batch = [mutated(rng, rng.choice(files)) for _ in range(8)]
            outcomes += await asyncio.gather(*(outcome(workers, data) for data in batch))
        processes = workers._pool._processes
        assert started.items() <= processes.items()
        assert len(processes) <= NUM_WORKERS
        assert max(map(peak_mib, processes)) < MAX_WORKER_MIB
        assert 20 < outcomes.count("read") < 380
        assert not [each for each in outcomes if "died" in each or "takes longer" in each]

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
    print(*workers._pool._processes, flush=True)
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
