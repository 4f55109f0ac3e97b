"""Added latency: requests at a steady rate, straight to an engine and through the router."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import uvloop

from benchmarks.router.traffic import NUM_REQUESTS, request_bytes
from octavo.bench.report import percentile

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from writing a request to the last byte of its answer."""

    p50_ms: float
    p99_ms: float
    count: int


def measure(port: int, *, rate: float, seconds: float, seed: int = 0) -> Latency:
    """Requests at `rate` a second over kept connections, spread like arrivals of many clients."""
    taken = uvloop.run(_drive(port, rate, seconds, random.Random(seed)))
    ms = [t * 1e3 for t in taken]
    return Latency(percentile(ms, 50), percentile(ms, 99), len(ms))


class _Caller(asyncio.Protocol):
    """One connection; answers have a content-length or end with the last chunk."""

    def __init__(self, done: Callable[[_Caller], None]) -> None:
        self.began_at = 0.0
        self._done = done
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> None:
        self._answer = b""
        self.began_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        at = lowered.find(b"content-length:")
        if at >= 0:
            length = int(lowered[at + 15 :].split(b"\r\n", 1)[0])
            if len(body) < length:
                return
        elif not body.endswith(b"0\r\n\r\n"):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"an answer that is no answer: {head[:60]!r}")
        self._done(self)


async def _drive(port: int, rate: float, seconds: float, rng: random.Random) -> list[float]:
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    idle: list[_Caller] = []
    late = 0

    def done(caller: _Caller) -> None:
        taken.append(time.perf_counter() - caller.began_at)
        idle.append(caller)

    for _ in range(CONNECTIONS):
        _, caller = await loop.create_connection(lambda: _Caller(done), "127.0.0.1", port)
        idle.append(caller)
    began_at = time.perf_counter()
    due, number = 0.0, 0
    while due < seconds:
        due += rng.expovariate(rate)
        wait_s = began_at + due - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if not idle:
            late += 1
            continue
        idle.pop().ask(request_bytes(rng.randrange(NUM_REQUESTS), number))
        number += 1
    await asyncio.sleep(0.5)
    if late > number / 100:
        raise SystemExit(f"{late} requests found no free connection: the machine cannot keep up")
    return taken
