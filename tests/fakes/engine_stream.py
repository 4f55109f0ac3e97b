"""An engine's stream over a real socket, which says what a test tells it to say, bytes included."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.protocol.endpoints import STREAM_PATH
from octavo_engine.protocol.stream import (
    CONTENT_TYPE,
    DELTA,
    DRAINING,
    HELLO,
    SNAPSHOT,
    Delta,
    Draining,
    Hello,
    Load,
    Snapshot,
)
from octavo_router.endpoints.endpoint import Address, EndpointSpec

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_KINDS: dict[type, str] = {Hello: HELLO, Snapshot: SNAPSHOT, Delta: DELTA, Draining: DRAINING}


def pack_frame(value: Hello | Snapshot | Delta | Draining) -> bytes:
    payload = msgspec.msgpack.encode((_KINDS[type(value)], value))
    return struct.pack("<I", len(payload)) + payload


def pack_stored(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QI", key, tokens) for key, tokens in pairs)


def pack_evicted(*keys: int) -> bytes:
    return b"".join(struct.pack("<Q", key) for key in keys)


@dataclass
class Peer:
    """One router that listens."""

    writer: asyncio.StreamWriter
    headers: dict[str, str]
    seq: int = 0

    def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def say(self, *frames: Hello | Snapshot | Delta | Draining) -> None:
        self.send(b"".join(map(pack_frame, frames)))

    def delta(
        self,
        *,
        stored: bytes = b"",
        evicted: bytes = b"",
        load: Load | None = None,
        seq: int | None = None,
    ) -> None:
        self.seq = self.seq + 1 if seq is None else seq
        self.say(Delta(self.seq, stored, evicted, load))

    def end(self) -> None:
        """A proper end of the body."""
        self.writer.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """What a killed process leaves: nothing more comes."""
        self.writer.transport.abort()


@dataclass
class EngineStream:
    """Use as `async with EngineStream() as engine`. Says hello and an empty snapshot by itself."""

    hello: Hello = field(default_factory=lambda: Hello(epoch="e1", model="m", names=["m"]))
    greets: bool = True
    status: int = 200  # of the stream
    pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # of all other paths
    port: int = 0
    requests: list[str] = field(default_factory=list)
    stored: bytes = b""  # what the snapshot tells

    def __post_init__(self) -> None:
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens, on the port it had before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a SIGKILL looks from outside: connections are reset and nobody listens."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def peer(self) -> Peer:
        """The next router that connects to the stream."""
        return await asyncio.wait_for(self._peers.get(), 10)

    def spec(self, id_: str = "e", **fields: Any) -> EndpointSpec:
        return replace(EndpointSpec(id_, Address("127.0.0.1", self.port)), **fields)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the router went away, which is its right
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        path = request.split()[1]
        self.requests.append(path)
        if path != STREAM_PATH or self.status != 200:
            status, body = (self.status, b"") if path == STREAM_PATH else self._page(path)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
            writer.write(body)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
            % CONTENT_TYPE.encode()
        )
        peer = Peer(writer, headers)
        if self.greets:
            peer.say(self.hello, Snapshot(self.stored, last=True))
        self._peers.put_nowait(peer)
        await reader.read(1)  # until the router goes
        raise ConnectionResetError

    def _page(self, path: str) -> tuple[int, bytes]:
        return self.pages.get(path, (404, b""))
