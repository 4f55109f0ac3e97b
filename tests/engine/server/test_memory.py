"""Memory goes back to the system once large bodies were handled: once, not for each."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from octavo_common.heap import can_give_back
from octavo_engine.server.memory import LARGE_BODY_BYTES, MemoryRelease
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.process import serving
from tests.fakes.server import running


def test_many_large_bodies_are_followed_by_one_release():
    async def story() -> None:
        releases: list[float] = []
        loop = asyncio.get_running_loop()
        memory = MemoryRelease(lambda: releases.append(loop.time()), delay_s=0.05)
        for _ in range(2):
            began_at, before = loop.time(), len(releases)
            for _ in range(5):
                memory.release_soon()
            await asyncio.sleep(0.2)
            assert len(releases) == before + 1
            assert releases[-1] - began_at >= 0.05

    asyncio.run(story())


@pytest.mark.parametrize(("size", "released"), [(LARGE_BODY_BYTES, 0), (LARGE_BODY_BYTES + 1, 1)])
def test_only_large_bodies_are_followed_by_a_release(size, released):
    with running(FakeEngine(), ServerSettings()) as server, server.client() as client:
        calls: list[int] = []
        server.service.memory.release_soon = lambda: calls.append(1)  # type: ignore[method-assign]
        body = b'{"prompt":"a"}'
        json = {"content-type": "application/json"}
        client.post("/v1/completions", content=body + b" " * (size - len(body)), headers=json)
        # The client has its answer a moment before the request is over.
        ends_at = time.monotonic() + (10.0 if released else 0.2)
        while len(calls) < max(released, 1) and time.monotonic() < ends_at:
            time.sleep(0.01)
        assert len(calls) == released


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.slow
@pytest.mark.skipif(not can_give_back(), reason="only glibc gives memory back")
def test_the_memory_of_large_bodies_goes_back():
    values = b'{"prompt":[' + b"1," * 1_000_000 + b"1]}"
    json = {"content-type": "application/json"}
    with serving("m", "--served-model-name", "sim") as server, server.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        before = anonymous_bytes(server.process.pid)
        for _ in range(3):
            assert client.post("/v1/completions", content=values, headers=json).status_code == 400
        ends_at = time.monotonic() + 20
        while anonymous_bytes(server.process.pid) > 1.1 * before:
            assert time.monotonic() < ends_at, "the memory stays"
            time.sleep(0.1)
