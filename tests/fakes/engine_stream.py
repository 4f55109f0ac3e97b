"""An engine's stream over a real socket, which says what a test tells it to say, bytes included."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field, replace
from typing import Any

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
from tests.fakes.raw_http import Head, RawHttp, begin_chunks, chunk, whole

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
        chunk(self.writer, data)

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
        chunk(self.writer, b"")

    def reset(self) -> None:
        """What a killed process leaves: nothing more comes."""
        self.writer.transport.abort()


@dataclass
class EngineStream(RawHttp):
    """Use as `async with EngineStream() as engine`. Says hello and an empty snapshot by itself."""

    hello: Hello = field(default_factory=lambda: Hello(epoch="e1", model="m", names=["m"]))
    greets: bool = True
    status: int = 200  # of the stream
    refusal: bytes = b""  # the body of any other status
    pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # of all other paths
    stored: bytes = b""  # what the snapshot tells

    def __post_init__(self) -> None:
        super().__post_init__()
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def peer(self) -> Peer:
        """The next router that connects to the stream."""
        return await asyncio.wait_for(self._peers.get(), 10)

    def spec(self, id_: str = "e", **fields: Any) -> EndpointSpec:
        return replace(EndpointSpec(id_, Address("127.0.0.1", self.port)), **fields)

    async def answer(
        self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if head.target != STREAM_PATH:
            whole(writer, *self._page(head.target))
            return
        if self.status != 200:
            whole(writer, self.status, self.refusal)
            return
        begin_chunks(writer, CONTENT_TYPE)
        peer = Peer(writer, head.headers)
        if self.greets:
            peer.say(self.hello, Snapshot(self.stored, last=True))
        self._peers.put_nowait(peer)
        await reader.read(1)  # until the router goes
        raise ConnectionResetError

    def _page(self, path: str) -> tuple[int, bytes]:
        return self.pages.get(path, (404, b""))
