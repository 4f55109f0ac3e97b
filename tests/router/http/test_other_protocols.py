"""HTTP/2 and TLS where they are not served: refused at once, and cheap however often they come."""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 1, 3, 4, 6, 8, 9
FLOODS = {
    "rapid reset": b"".join(
        frame(HEADERS, n, b"\x82\x84", 4) + frame(RST_STREAM, n, b"\0\0\0\x08")
        for n in range(1, 20_000, 2)
    ),
    "continuation": frame(HEADERS, 1, b"\x82") + frame(CONTINUATION, 1, b"\0" * 64) * 10_000,
    "settings": frame(SETTINGS, 0) * 50_000,
    "ping": frame(PING, 0, b"12345678") * 50_000,
    "window": frame(WINDOW_UPDATE, 0, b"\0\0\0\0") * 50_000,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_it_is_refused_at_once_and_costs_nearly_nothing(flood):
    """One answer, the close, and nothing of what follows is looked at."""

    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream() as upstream,
            routing_to(upstream.port) as rig,
            await RawClient.open(rig.port) as other,
        ):
            assert (await other.ask(chat())).status == 200
            began_s = time.process_time()
            opening = b"" if flood == "TLS" else PREFACE
            for _ in range(20):
                async with await RawClient.open(rig.port) as client:
                    client.writer.write(opening + FLOODS[flood])
                    said = await client.ended()
                    status = int(said[9:12])
                    assert status == (400 if flood == "TLS" else 505)
                    assert said.count(b"x-request-id:") == 1
            assert time.process_time() - began_s < 2.0  # both sides of forty connections
            assert (await other.ask(chat())).status == 200
            await rig.until(lambda: len(rig.shared.connections) == 1)
            await rig.settled()
            assert len(upstream.requests) == 2

    ask()


@on_loop
async def test_many_half_open_preludes_hold_nobody_up():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as other,
    ):
        clients = [await RawClient.open(rig.port) for _ in range(100)]
        for client in clients:
            client.writer.write(PREFACE[:10])
        assert (await other.ask(chat())).status == 200
        for client in clients:
            client.writer.write(PREFACE[10:])
        answers = await asyncio.gather(*(client.ended() for client in clients))
        assert all(b" 505 " in answer[:16] for answer in answers)
        for client in clients:
            client.writer.close()
        assert (await other.ask(chat())).status == 200
