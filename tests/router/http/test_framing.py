"""However the bytes are cut, the same requests are read, and they end where others end them."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.config.settings import LimitsConfig, TimeoutsConfig
from octavo_router.endpoints.endpoint import Address, Endpoint, EndpointSpec
from octavo_router.http.chunked import ChunkDecoder, ChunkError, chunk
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.connection_settings import Shared
from octavo_router.http.deadlines import DeadlineTick
from octavo_router.http.response_head import ResponseError, ResponseHeadParser
from octavo_router.proxy.heads import EndpointLines, request_bytes
from tests.fakes.http_parsers import PARSERS

if TYPE_CHECKING:
    from octavo_router.errors import Rejected
    from octavo_router.http.request_head import RequestHead


class Transport:
    """Remembers what is written, until it is closed."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def set_write_buffer_limits(self, *, high: int, low: int) -> None: ...

    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Collect:
    """A service that answers everything at once."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes, bytes]] = []
        self.heads: list[RequestHead] = []
        self.refusals: list[int] = []

    def new_request_id(self) -> str:
        return "id"

    def check(self, connection: ClientConnection, head: RequestHead) -> None: ...

    def handle(self, connection: ClientConnection, head: RequestHead, body: bytes) -> None:
        self.requests.append((head.method, head.target, body))
        self.heads.append(head)
        keep_alive = not connection.wants_close
        connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
        connection.finish(keep_alive=keep_alive)

    def refused(self, connection: ClientConnection, error: Rejected, request_id: str) -> None:
        self.refusals.append(error.status)


def read(pieces: list[bytes]) -> Collect:
    service = Collect()
    loop: Any = None  # nothing waits here
    shared = Shared(service, LimitsConfig(), TimeoutsConfig(), DeadlineTick(loop), loop)
    connection = ClientConnection(shared)
    transport: Any = Transport()
    connection.connection_made(transport)
    for piece in pieces:
        if transport.is_closed:
            break
        if piece:
            connection.data_received(piece)
    return service


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


# llhttp refuses trailers that frame; the router drops all trailers.
FRAMING_TRAILER = re.compile(
    rb"\r\n0+[^\r\n]*\r\n(?:[^\r\n]+\r\n)*?(?:transfer-encoding|content-length):", re.IGNORECASE
)
LINES = EndpointLines(
    Endpoint(EndpointSpec("engine", Address("10.0.0.1", 8000))),
    engine_key="k", passes_keys=True,
)  # fmt: skip
BODIES = st.binary(max_size=40)
NAMES = st.sampled_from([b"A", b"x-thing", b"Accept", b"Content-Type", b"Connection", b"Expect"])
VALUES = st.sampled_from([b"b", b"", b"close", b"keep-alive", b"\xe9", b"100-continue", b"a, b"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    body = draw(BODIES)
    lines = [
        draw(st.sampled_from([b"GET / HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"POST /x HTTP/1.0"])),
        b"Host: x",
    ]
    for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=3)):
        lines.append(name + b": " + value)
    if draw(st.booleans()):
        lines.append(b"Transfer-Encoding: chunked")
        pieces = [chunk(part) for part in cut(body, draw(st.lists(st.integers(0, 40)))) if part]
        body = b"".join(pieces) + b"0\r\n\r\n"
    else:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


STREAMS = st.lists(requests(), min_size=1, max_size=3).map(b"".join)
CUTS = st.lists(st.integers(0, 400), max_size=8)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(STREAMS, CUTS)
def test_how_the_bytes_are_cut_changes_nothing(stream: bytes, places: list[int]):
    whole, pieces = read([stream]), read(cut(stream, places))
    assert pieces.requests == whole.requests
    assert pieces.refusals == whole.refusals
    bytewise = read([stream[i : i + 1] for i in range(len(stream))])
    assert bytewise.requests == whole.requests


def test_an_empty_line_may_come_before_a_request_and_a_second_one_never():
    request = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nb"
    for num_lines, found in ((0, 3), (1, 3), (2, 1)):
        stream = (request + b"\r\n" * num_lines) * 2 + request
        for size in (1, 2, len(request), len(request) + 2, len(stream)):
            service = read([stream[at : at + size] for at in range(0, len(stream), size)])
            assert len(service.requests) == found, (num_lines, size)
            assert service.refusals == [400] * (found == 1)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(STREAMS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_whoever_else_reads_mutated_bytes_finds_the_same_requests(
    stream: bytes, mutations: list[tuple[int, int]]
):
    data = bytearray(stream)
    for place, byte in mutations:
        data[place % len(data)] = byte
    agrees_with_others(bytes(data))


def agrees_with_others(data: bytes) -> Collect:
    """What the router reads of these bytes is what others read, and what it forwards is that.

    We may refuse what they take, and h11 and aiohttp what we take; what both take is the same, to
    the byte. An engine reads with llhttp, which must read all that we do.
    """
    service = read([data])
    # A method that nobody knows is their parser's end, and our 405: it goes to no engine.
    ours = list(takewhile(lambda one: one[0] in ("GET", "POST"), service.requests))
    for name, parse in PARSERS.items():
        theirs = parse(data)
        count = min(len(ours), len(theirs))
        if name == "llhttp" and not FRAMING_TRAILER.search(data):
            count = len(ours)
        assert ours[:count] == theirs[:count], name
    for head, request in zip(service.heads, ours, strict=False):
        sent = request_bytes(head, LINES, b"id", request[2], forward=head.forward)
        for name, parse in PARSERS.items():
            read_there = parse(sent + sent)
            count = 2 if name == "llhttp" else len(read_there)
            assert read_there == [request] * count, name
    return service


def test_others_read_what_is_forwarded_and_find_a_second_request_where_there_is_one():
    """So that the comparison below compares something."""
    request = (
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n"
    )
    second = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
    smuggling = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" + second
    (head,) = agrees_with_others(request).heads
    sent = request_bytes(head, LINES, b"id", b"b", forward=head.forward)
    for parse in PARSERS.values():
        assert parse(sent) == [("POST", b"/a", b"b")]
        assert parse(smuggling) == [("POST", b"/a", b""), ("GET", b"/b", b"")]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=5), CUTS, st.booleans())
def test_chunks_come_out_as_they_went_in(bodies: list[bytes], places: list[int], is_strict: bool):
    coded = b"".join(map(chunk, bodies)) + b"0\r\n\r\n"
    decoder = ChunkDecoder(is_strict=is_strict)
    got = b"".join(part for piece in cut(coded + b"next", places) for part in decoder.feed(piece))
    assert got == b"".join(bodies)
    assert decoder.is_done
    assert decoder.num_chunks == len(bodies)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=60), CUTS)
def test_any_bytes_are_chunks_or_an_error_however_they_are_cut(data: bytes, places: list[int]):
    def decode(pieces: list[bytes]) -> bytes | None:
        decoder = ChunkDecoder(is_strict=True)
        try:
            return b"".join(part for piece in pieces for part in decoder.feed(piece))
        except ChunkError:
            return None

    whole, pieces = decode([data]), decode(cut(data, places))
    assert (whole is None) == (pieces is None)
    assert whole == pieces


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_head_of_an_answer_or_an_error(data: bytes):
    parser = ResponseHeadParser()
    for start in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: "):
        try:
            head = parser.parse(start + data)
        except ResponseError:
            continue
        assert 0 <= head.status <= 999
        assert head.content_length is None or head.content_length >= 0
