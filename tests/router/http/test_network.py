"""Native sockets do what asyncio's transports promise: every story is told on both."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from octavo_router.http.network import Network
from octavo_router.http.sockets import open_listener
from octavo_router.residency import native
from tests.fakes.router_rig import on_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

BIG = os.urandom(2**20) * 8  # more than any socket's buffers


class Told(asyncio.Protocol):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = b""
        self.events: list[str] = []
        self.error: Exception | None = None
        self.keeps_half = False
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.on_data(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_half

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append("lost")
        self.error = error
        self.lost.set()


async def until(fact: Callable[[], bool]) -> None:
    while not fact():  # noqa: ASYNC110  # facts have no events
        await asyncio.sleep(0.001)


@pytest.fixture(params=["loop", "native"])
def kind(request: pytest.FixtureRequest) -> str:
    return cast("str", request.param)


@asynccontextmanager
async def network_of(kind: str) -> AsyncIterator[Network]:
    make_poller = native.load().make_poller
    assert make_poller is not None
    network = Network(asyncio.get_running_loop(), make_poller if kind == "native" else None)
    try:
        yield network
    finally:
        await asyncio.sleep(0)
        network.close()


@asynccontextmanager
async def pair(
    kind: str, make: Callable[[], Told] = Told, *, receive_buffer: int = 0
) -> AsyncIterator[tuple[Told, socket.socket]]:
    """A protocol of ours, and the bare socket that has connected to it."""
    loop = asyncio.get_running_loop()
    async with network_of(kind) as network:
        ours: list[Told] = []

        def factory() -> Told:
            ours.append(make())
            return ours[-1]

        listening = await network.listen(factory, open_listener("127.0.0.1", 0))
        with socket.socket() as peer:
            if receive_buffer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            peer.setblocking(False)
            await loop.sock_connect(peer, listening.sockets[0].getsockname())
            await until(lambda: bool(ours))
            try:
                yield ours[0], peer
            finally:
                ours[0].transport.abort()
                await ours[0].lost.wait()
                listening.close()


async def read_all(peer: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(peer, 2**18):
        received += data
    return received


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


@on_loop
async def test_what_is_sent_arrives_and_what_is_written_leaves_in_order(kind: str):
    async with pair(kind) as (ours, peer):
        loop = asyncio.get_running_loop()
        ours.on_data = lambda data: [ours.transport.write(piece) for piece in (b"a", b"", data)]  # type: ignore[assignment]  # what it returns is nobody's
        await loop.sock_sendall(peer, b"hello")
        assert await loop.sock_recv(peer, 100) == b"ahello"
        ours.transport.write(bytearray(b"outside "))
        ours.transport.write(memoryview(b"of an event"))
        await until(lambda: ours.transport.get_write_buffer_size() == 0)
        received = b""
        while len(received) < 19:
            received += await loop.sock_recv(peer, 100)
        assert received == b"outside of an event"
        assert ours.received == b"hello"
        assert ours.transport.get_extra_info("peername") == peer.getsockname()
        assert ours.transport.get_extra_info("nothing", 7) == 7
        told = ours.transport.get_extra_info("socket")
        assert told.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert told.getpeername() == peer.getsockname()


@on_loop
async def test_a_reader_that_is_slow_pauses_the_writer_and_gets_every_byte(kind: str):
    async with pair(kind) as (ours, peer):
        ours.transport.set_write_buffer_limits(high=65536, low=0)
        ours.transport.write(BIG)
        ours.transport.write(b"end")
        await until(lambda: "pause" in ours.events)
        assert ours.transport.get_write_buffer_size() > 65536
        ours.transport.close()
        assert ours.transport.is_closing()
        assert await read_all(peer) == BIG + b"end"
        await ours.lost.wait()
        assert ours.events[:3] == ["made", "pause", "resume"]
        assert ours.events[-1] == "lost"
        assert ours.error is None


@on_loop
async def test_nothing_is_read_while_reading_is_paused_and_nothing_is_lost(kind: str):
    async with pair(kind) as (ours, peer):
        loop = asyncio.get_running_loop()
        ours.transport.pause_reading()
        await loop.sock_sendall(peer, b"kept")
        peer.shutdown(socket.SHUT_WR)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (ours.received, ours.events) == (b"", ["made"])
        ours.transport.resume_reading()
        await ours.lost.wait()
        assert (ours.received, ours.events) == (b"kept", ["made", "eof", "lost"])


@on_loop
async def test_who_has_said_all_still_hears_the_rest(kind: str):
    def make() -> Told:
        told = Told()
        told.keeps_half = True
        return told

    async with pair(kind, make) as (ours, peer):
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: "eof" in ours.events)
        ours.transport.write(BIG)
        ours.transport.write_eof()
        assert await read_all(peer) == BIG
        assert "lost" not in ours.events or ours.error is None


@on_loop
async def test_a_reset_is_told_and_one_that_is_cut_hears_it(kind: str):
    async with pair(kind) as (ours, peer):
        reset(peer)
        await ours.lost.wait()
        assert isinstance(ours.error, ConnectionResetError)
        if kind == "native":  # the loop's own raises here
            ours.transport.write(b"into the void")
            ours.transport.abort()
            ours.transport.close()
    async with pair(kind) as (ours, peer):
        ours.transport.abort()
        assert "lost" not in ours.events  # not from within the call
        assert await read_all(peer) == b""
        await ours.lost.wait()
        assert ours.error is None


@on_loop
async def test_a_write_to_who_is_gone_ends_the_connection(kind: str):
    async with pair(kind, receive_buffer=4096) as (ours, peer):
        ours.transport.pause_reading()
        ours.transport.write(BIG)
        reset(peer)
        await ours.lost.wait()
        assert isinstance(ours.error, OSError)


@on_loop
async def test_a_protocol_that_breaks_costs_its_connection_alone(kind: str):
    def broken(data: bytes) -> None:
        raise ValueError("a mistake")

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: complaints.append(told))
    async with pair(kind) as (ours, peer):
        ours.on_data = broken
        await asyncio.get_running_loop().sock_sendall(peer, b"x")
        await ours.lost.wait()
        assert [str(told["exception"]) for told in complaints] == ["a mistake"]
        assert await read_all(peer) == b""


@on_loop
async def test_one_event_may_end_others_that_are_due(kind: str):
    """All are ready at once; whoever is first cuts the rest, which hear nothing but their end."""
    loop = asyncio.get_running_loop()
    async with network_of(kind) as network:
        ours: list[Told] = []

        def cut_others(data: bytes) -> None:
            for one in ours:
                if not one.received:
                    one.transport.abort()

        def factory() -> Told:
            ours.append(Told())
            ours[-1].on_data = cut_others
            return ours[-1]

        listening = await network.listen(factory, open_listener("127.0.0.1", 0))
        peers = [socket.create_connection(listening.sockets[0].getsockname()) for _ in range(20)]
        await until(lambda: len(ours) == len(peers))
        for peer in peers:
            peer.sendall(b"now")
        await until(lambda: sum(one.lost.is_set() for one in ours) == len(ours) - 1)
        assert [one.received for one in ours].count(b"now") == 1
        for one in ours:
            one.transport.abort()
        for peer in peers:
            peer.close()
        listening.close()
        await loop.shutdown_asyncgens()


@on_loop
async def test_no_room_for_another_connection_is_a_pause_not_an_end(monkeypatch):
    """Natively only: the loop's own way of it is the loop's."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: complaints.append(told))
    import resource

    async with network_of("native") as network:
        ours: list[Told] = []

        def factory() -> Told:
            ours.append(Told())
            return ours[-1]

        listening = await network.listen(factory, open_listener("127.0.0.1", 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        peer = socket.socket()
        peer.setblocking(False)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno() + 1, hard))
            await asyncio.get_running_loop().sock_connect(peer, listening.sockets[0].getsockname())
            await until(lambda: bool(complaints))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert complaints[0]["exception"].errno == errno.EMFILE
        await until(lambda: bool(ours))  # it is let in when there is room again
        peer.close()
        await ours[0].lost.wait()
        listening.close()


@on_loop
async def test_who_cannot_be_reached_is_said_by_the_system(kind: str):
    with open_listener("127.0.0.1", 0) as closed:
        port = closed.getsockname()[1]
    async with network_of(kind) as network:
        with pytest.raises(ConnectionRefusedError):
            await network.connect(Told, "127.0.0.1", port)
        with pytest.raises(OSError):  # whatever the resolver says
            await network.connect(Told, "no-such-host.invalid", port)


@on_loop
async def test_a_name_is_resolved_and_its_addresses_are_tried(kind: str):
    async with network_of(kind) as network:
        heard: list[Told] = []

        def factory() -> Told:
            heard.append(Told())
            return heard[-1]

        listening = await network.listen(factory, open_listener("127.0.0.1", 0))
        port = listening.sockets[0].getsockname()[1]
        ours = await network.connect(Told, "localhost", port)
        ours.transport.write(b"hello")
        await until(lambda: bool(heard) and heard[0].received == b"hello")
        ours.transport.close()
        await heard[0].lost.wait()
        await ours.lost.wait()
        listening.close()
