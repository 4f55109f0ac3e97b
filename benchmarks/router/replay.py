"""Engines and clients that replay a mix of `traffic` over sockets: each a process of its own.

    python -m benchmarks.router.replay engines MIX PORT COUNT
    python -m benchmarks.router.replay load MIX PORT CONNECTIONS SECONDS

The engines answer on COUNT ports from PORT on, and take what a tracing collector would be sent. The
load keeps one request under way on each connection, and prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, cast

import uvloop

from benchmarks.router.traffic import MIXES, MODELS, Answers, requests
from octavo.bench.report import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.router.traffic import Mix, Template

_REQUESTS_PER_CLIENT: Final = 128
_END_OF_CHUNKS: Final = b"\r\n0\r\n\r\n"


# -- engines


class EngineConnection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received = b""
        self._missing = 0  # bytes of the body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < self._missing:
            return
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        self._missing = end + 4 + length_of(self._received[:end])
        if len(self._received) >= self._missing:
            request, self._received, self._missing = self._received, b"", 0
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"POST /v1/chat/completions "):
            if b'"stream": true' in request:
                self._write_next(self._answers.stream())
            else:
                self._transport.write(self._answers.whole())
        elif request.startswith((b"GET /v1/models ", b"GET /health ", b"POST /v1/traces ")):
            self._write_small(b"200 OK", MODELS if b"/v1/models" in request[:32] else b"{}")
        else:
            self._write_small(b"404 Not Found", b"{}")

    def _write_small(self, status: bytes, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def _write_next(self, pieces: Iterator[bytes]) -> None:
        """Others are served between two pieces, so that each is a read of the router's."""
        piece = next(pieces, None)
        if piece is not None and not self._transport.is_closing():
            self._transport.write(piece)
            asyncio.get_running_loop().call_soon(self._write_next, pieces)


async def serve(mix: Mix, first_port: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    answers = Answers(mix)
    for port in range(first_port, first_port + count):
        await loop.create_server(
            lambda: EngineConnection(answers), "127.0.0.1", port, backlog=4096
        )  # fmt: skip
    while True:
        await asyncio.sleep(1.0)
        answers.renew_date()


def length_of(head: bytes) -> int:
    """Of the body, as its head says."""
    at = head.lower().find(b"\r\ncontent-length:")
    return int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


# -- load


class Client(asyncio.Protocol):
    """One connection: the next request follows when an answer is whole."""

    def __init__(self, load: Load, templates: list[Template]) -> None:
        self._load = load
        self._templates = templates
        self._next = 0
        self._sent_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._tail = b""  # the last bytes that came
        self._missing = -1  # bytes of the answer; -1: not known yet
        self._status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        template = self._templates[self._next % len(self._templates)]
        self._next += 1
        self._load.num_sent += 1
        self._sent_at = time.perf_counter()
        self._transport.write(template.numbered(self._load.num_sent))

    def data_received(self, data: bytes) -> None:
        if not self._status:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            head = data[:end]
            self._status = int(head[9:12])
            if b"chunked" not in head:
                self._missing = end + 4 + length_of(head)
            self._tail = b""
        if self._missing >= 0:
            self._missing -= len(data)
            is_over = self._missing <= 0
        else:
            self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
            is_over = self._tail == _END_OF_CHUNKS
        if is_over:
            self._load.count(self._status, time.perf_counter() - self._sent_at)
            self._begin()
            if not self._load.is_over:
                self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._load.is_over:
            self._load.statuses[0] += 1


class Load:
    """What all clients saw."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.is_over = False
        self.statuses: Counter[int] = Counter()  # 0: a connection was lost
        self.seconds: list[float] = []

    def count(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.seconds.append(seconds)


async def drive(mix: Mix, port: int, connections: int, seconds: float) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    load = Load()
    # A key and a certificate of the benchmark's own: that they are trusted is not measured.
    tls = ssl._create_unverified_context() if mix.uses_tls else None
    lists = [requests(mix, _REQUESTS_PER_CLIENT, client=i) for i in range(connections)]
    began_at = time.perf_counter()
    transports = []
    for templates in lists:
        transport, _ = await loop.create_connection(
            lambda templates=templates: Client(load, templates), "127.0.0.1", port, ssl=tls
        )  # fmt: skip
        transports.append(transport)
    await asyncio.sleep(seconds)
    load.is_over = True
    took_s = time.perf_counter() - began_at
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0)  # the loop closes their sockets in its next turn
    num_good = load.statuses.pop(200, 0)
    ms = [one * 1e3 for one in load.seconds] or [0.0]
    return {
        "requests": num_good,
        "req_s": num_good / took_s,
        "p50_ms": percentile(ms, 50),
        "p99_ms": percentile(ms, 99),
        "bad": sum(load.statuses.values()),
    }


def main() -> None:
    what, name, *numbers = sys.argv[1:]
    mix = MIXES[name]
    if what == "engines":
        uvloop.run(serve(mix, int(numbers[0]), int(numbers[1])))
    elif what == "load":
        found = uvloop.run(drive(mix, int(numbers[0]), int(numbers[1]), float(numbers[2])))
        print(json.dumps(found))
    else:
        raise SystemExit(f"{what!r} is not one of engines, load")


if __name__ == "__main__":
    main()
