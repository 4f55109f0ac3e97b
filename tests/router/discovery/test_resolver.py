"""DNS messages and the resolver that speaks them to a real, scripted name server."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.discovery.dns_wire import SRV, A, DnsError, decode_answer, encode_query
from octavo_router.discovery.resolver import SystemResolver
from octavo_router.errors import Unreachable

if TYPE_CHECKING:
    from pathlib import Path


def name(text: str) -> bytes:
    labels = (label.encode() for label in text.split("."))
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def record(owner: bytes, kind: int, data: bytes) -> bytes:
    return owner + struct.pack(">HHIH", kind, 1, 30, len(data)) + data


def answer(query: bytes, *records: bytes, flags: int = 0x8180) -> bytes:
    head = query[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0)
    return head + query[12:] + b"".join(records)


def srv(port: int, target: bytes, priority: int = 0) -> bytes:
    return struct.pack(">HHH", priority, 5, port) + target


def test_a_query_is_as_the_standard_says():
    assert encode_query(7, "_http._tcp.a.", SRV) == (
        b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
        b"\x05_http\x04_tcp\x01a\x00\x00\x21\x00\x01"
    )


def test_an_answer_with_compressed_names():
    query = encode_query(7, "_x._tcp.a", SRV)
    pointer = b"\xc0\x0c"  # the question's name
    records = decode_answer(
        7,
        answer(
            query,
            record(pointer, SRV, srv(8001, b"\x02e0" + b"\xc0\x14")),  # e0 + "a"
            record(name("e0.a"), A, bytes([10, 0, 0, 1])),
        ),
    )
    assert [(r.target, r.port) for r in records] == [("e0.a", 8001), ("10.0.0.1", 0)]


def test_a_name_that_points_at_itself_has_no_end():
    query = encode_query(7, "a", SRV)
    with pytest.raises(DnsError, match="no end"):
        decode_answer(7, answer(query, record(b"\xc0\x13", A, b"1234")))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_an_answer_or_an_error(data):
    query = encode_query(7, "a", SRV)
    for message in (answer(query, data), data):
        with suppress(DnsError):
            decode_answer(7, message)


class NameServer(asyncio.DatagramProtocol):
    """Answers queries for _x._tcp.engines; over UDP perhaps only that the answer is too long."""

    def __init__(self, *, truncates: bool = False) -> None:
        self.truncates = truncates
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = answer(data, flags=0x8380) if self.truncates else self.reply(data)
        self.transport.sendto(reply, addr)

    @staticmethod
    def reply(query: bytes) -> bytes:
        if b"engines" not in query:
            return answer(query, flags=0x8183)
        owner = b"\xc0\x0c"
        return answer(
            query,
            record(owner, SRV, srv(8001, name("e1.a"))),
            record(owner, SRV, srv(8002, name("e2.a"))),
            record(owner, SRV, srv(9999, name("spare.a"), priority=10)),
            record(name("e1.a"), A, bytes([10, 0, 0, 1])),
            record(name("e2.a"), A, bytes([10, 0, 0, 2])),
        )


async def resolve(tmp_path: Path, wanted: str, *, truncates: bool) -> list[tuple[str, int]]:
    loop = asyncio.get_running_loop()
    tcp = await asyncio.start_server(_serve_tcp, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    transport, _ = await loop.create_datagram_endpoint(
        lambda: NameServer(truncates=truncates), local_addr=("127.0.0.1", port)
    )
    conf = tmp_path / "resolv.conf"
    conf.write_text(f"search x\nnameserver 127.0.0.1#{port}\n")
    try:
        return await SystemResolver(resolv_conf=conf, timeout_s=5.0).services(wanted)
    finally:
        transport.close()
        tcp.close()
        await tcp.wait_closed()


async def _serve_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    query = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    reply = NameServer.reply(query)
    writer.write(len(reply).to_bytes(2, "big") + reply)
    writer.close()


@pytest.mark.parametrize("truncates", [False, True])
def test_service_records_of_the_first_priority(tmp_path, truncates):
    found = asyncio.run(resolve(tmp_path, "_x._tcp.engines", truncates=truncates))
    assert found == [("10.0.0.1", 8001), ("10.0.0.2", 8002)]


def test_a_name_that_does_not_exist(tmp_path):
    with pytest.raises(Unreachable, match="does not exist"):
        asyncio.run(resolve(tmp_path, "_x._tcp.others", truncates=False))


def test_localhost_is_an_ipv4_address_first():
    assert asyncio.run(SystemResolver().addresses("localhost"))[0] == "127.0.0.1"
