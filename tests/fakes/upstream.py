"""Upstreams that do on a real socket exactly what a test scripts, bytes and resets included."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


@dataclass
class Received:
    """One request as it arrived."""

    line: bytes
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    """The router at the other end of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number  # of the connection, from 0
        self.has_left = asyncio.Event()

    async def send(self, data: bytes) -> None:
        if self.writer.transport.is_closing():
            raise ConnectionResetError("it was reset by somebody else")
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, *, status: str = "200 OK", more: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}"
        await self.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def begin_stream(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
        await self.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def left(self) -> None:
        """Waits until the router closes its end."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.has_left.set()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


async def fixed(peer: Peer, request: Received) -> None:
    """The usual answer, streamed if that was requested."""
    if request.json.get("stream"):
        await peer.begin_stream()
        for word in ("hel", "lo"):
            await peer.chunk(event(word))
        await peer.chunk(b"data: [DONE]\n\n")
        await peer.end_stream()
    else:
        await peer.answer(json.dumps(CHAT).encode())


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


@dataclass
class ScriptedUpstream:
    """Use as `async with`. `script` is called for each request; what it raises fails the test."""

    script: Callable[[Peer, Received], Awaitable[None]] = fixed
    requests: list[Received] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    num_open: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    failures: list[BaseException] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None and self.failures:
            raise self.failures[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        peer = Peer(reader, writer, len(self.peers))
        self.peers.append(peer)
        self.num_open += 1
        try:
            while True:
                request = await _read(reader)
                if request is None:
                    break
                self.requests.append(request)
                await self.script(peer, request)
                if writer.transport.is_closing():
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            peer.has_left.set()
            self.num_open -= 1
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head[:-4].split(b"\r\n")
    headers = [
        (name.decode("latin-1"), value.strip().decode("latin-1"))
        for name, _, value in (part.partition(b":") for part in lines)
    ]
    lengths = [int(value) for name, value in headers if name.lower() == "content-length"]
    assert len(lengths) <= 1, headers
    assert not any(name.lower() == "transfer-encoding" for name, _ in headers), headers
    body = await reader.readexactly(lengths[0]) if lengths else b""
    return Received(line, headers, body)


def closed_port() -> int:
    """Nobody listens there."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class BlackHole:
    """A port that never accepts: its queue is full, so further SYNs get no answer. A `with`."""

    def __enter__(self) -> Self:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._fillers = [socket.socket() for _ in range(4)]
        for filler in self._fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self._fillers, self._listener):
            sock.close()
