"""Streams through the router: how many events a second it relays.

python -m benchmarks.router.chunks PORT EVENTS_PER_WRITE    an engine that streams at full speed
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, cast

import uvloop

EVENTS_PER_STREAM = 2000
STREAMS = 32
_EVENT = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    ],
}
EVENT = b"data: " + json.dumps(_EVENT, separators=(",", ":")).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


class StreamingEngine(asyncio.Protocol):
    """Answers each request with a stream; `events_per_write` of its events go out at once."""

    def __init__(self, events_per_write: int) -> None:
        self._piece = _chunk(EVENT * events_per_write)
        self._writes = EVENTS_PER_STREAM // events_per_write
        self._received = b""
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lowered = head.lower()
        at = lowered.find(b"content-length:")
        length = int(lowered[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) < length:
            return
        self._received = body[length:]
        if head.startswith(b"GET /v1/models"):
            self._whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        elif head.startswith(b"POST"):
            self._task = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._whole(b"{}", status=b"404 Not Found")

    def _whole(self, body: bytes, *, status: bytes = b"200 OK") -> None:
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )

    async def _stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(self._writes):
            self.transport.write(self._piece)
            await self._may_write.wait()
            await asyncio.sleep(0)
        self.transport.write(_chunk(DONE) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def measure(port: int) -> float:
    """Events a second that arrive at STREAMS clients."""
    return uvloop.run(_read_all(port))


async def _read_all(port: int) -> float:
    body = b'{"model":"m","messages":[{"role":"user","content":"go"}],"stream":true}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )

    async def read_one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.write(head + body)
        events, last = 0, b""
        while not last.endswith(b"0\r\n\r\n"):
            data = await reader.read(2**18)
            if not data:
                raise SystemExit("a stream broke off")
            events += (last[-8:] + data).count(b'data: {"id"') - last[-8:].count(b'data: {"id"')
            last = (last + data)[-16:]
        writer.close()
        return events

    began_at = time.perf_counter()
    counts = await asyncio.gather(*(read_one() for _ in range(STREAMS)))
    taken_s = time.perf_counter() - began_at
    return sum(counts) / taken_s


async def _serve(port: int, events_per_write: int) -> None:
    loop = asyncio.get_running_loop()
    server: Any = await loop.create_server(
        lambda: StreamingEngine(events_per_write), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
