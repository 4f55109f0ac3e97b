"""One connection: other protocols, versions, pipelines, halves that close, answers that arrive."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from typing import TYPE_CHECKING

import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, post, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMPLETIONS = "/v1/completions"
UPGRADES = {
    "h2c": ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk"),
    "websocket": ("connection: upgrade", "upgrade: websocket"),
}


def new_uvloop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


# Served by uvloop where it is installed: its transports close in other ways than asyncio's own.
@pytest.fixture(params=[asyncio.new_event_loop, new_uvloop], ids=["asyncio", "uvloop"])
def loop_factory(request) -> Callable[[], asyncio.AbstractEventLoop]:
    factory: Callable[[], asyncio.AbstractEventLoop] = request.param
    return factory


@pytest.fixture
def server(loop_factory) -> Iterator[RunningServer]:
    settings = ServerSettings(limits=RequestLimits(max_header_bytes=16_384))
    with running(settings=settings, loop_factory=loop_factory) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def body(**more: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 5, "ignore_eos": True, **more}).encode()


def request(*headers: str, content: bytes, version: str = "HTTP/1.1") -> bytes:
    """A completion whose connection stays."""
    data = post(COMPLETIONS, content, *headers).replace(b"connection: close\r\n", b"", 1)
    return data.replace(b"HTTP/1.1", version.encode(), 1)


def chunked(data: bytes) -> bytes:
    head, _, content = data.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    return b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n" + framed


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


# ── other protocols ──


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("framed", [bytes, chunked], ids=["length", "chunks"])
def test_a_post_that_offers_another_protocol_is_answered_with_its_body(server, upgrade, framed):
    data = framed(request(*UPGRADES[upgrade], content=body()))
    last = post(COMPLETIONS, body())
    places = [0, 1, data.index(b"\r\n\r\n") + 4, data.index(b"\r\n\r\n") + 9, len(data)]
    for place in places:
        with connect(server) as connection:
            connection.sendall(data[:place])
            server.call(lambda: None)  # its loop has come round: the pieces are read apart
            connection.sendall(data[place:] + last)
            answer = read_all(connection)
        assert statuses(answer) == [200, 200], (place, answer)
        assert answer.count(b'"completion_tokens":5') == 2


def test_a_get_that_offers_another_protocol_is_answered(server):
    head = "\r\n".join(["GET /health HTTP/1.1", "host: x", *UPGRADES["h2c"]]).encode()
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert statuses(server.raw(head + b"\r\n\r\n" + last)) == [200, 200]


def test_garbage_behind_an_offer_of_another_protocol_is_a_400(server):
    data = chunked(request(*UPGRADES["h2c"], content=body()))
    assert statuses(server.raw(data.replace(b"\r\n0\r\n", b"\r\nx\r\n"))) == [400]


@pytest.mark.parametrize(
    ("version", "status", "code"),
    [
        (" HTTP/2.0", 505, "http_version"),
        (" HTTP/1.2", 400, "invalid_http"),
        ("", 400, "invalid_http"),
    ],
)
def test_other_versions_of_http_are_refused(server, version, status, code):
    answer = server.raw(b"GET /health%b\r\nhost: x\r\n\r\n" % version.encode())
    assert statuses(answer) == [status]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code


def test_http_1_0_has_no_chunks(server):
    data = chunked(request(content=body(), version="HTTP/1.0"))
    answer = server.raw(data)
    assert statuses(answer) == [400]
    assert b"Content-Length" in answer


# ── refusals arrive ──


def test_a_refusal_of_endless_headers_arrives_though_more_is_on_its_way(server):
    heads = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: %b\r\n" % (b"b" * 100) * 20_000
    with connect(server) as connection:
        connection.sendall(heads)
        assert statuses(read_all(connection)) == [431]


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_an_answer_arrives_though_its_request_is_still_on_its_way(loop_factory, version):
    settings = ServerSettings(api_keys=("k",))
    data = post(COMPLETIONS, body(user="x" * 5_000_000)).replace(b"HTTP/1.1", version.encode(), 1)
    with (
        running(settings=settings, loop_factory=loop_factory) as server,
        connect(server) as connection,
    ):
        connection.sendall(data)
        assert statuses(read_all(connection)) == [401]


def test_what_is_left_of_an_answered_request_must_come_in_time(loop_factory):
    settings = ServerSettings(api_keys=("k",), limits=RequestLimits(header_timeout_s=0.2))
    data = request(content=body(user="x" * 1000))
    with (
        running(settings=settings, loop_factory=loop_factory) as server,
        connect(server) as connection,
    ):
        connection.sendall(data[:-500])
        assert statuses(read_all(connection)) == [401]


# ── several at once ──


def test_garbage_behind_requests_under_way_ends_them_without_a_word_in_the_log(
    loop_factory, caplog
):
    engine = FakeEngine(hold_after=2)
    with (
        running(engine, loop_factory=loop_factory) as server,
        caplog.at_level(logging.ERROR),
        connect(server) as connection,
    ):
        connection.sendall(request(content=body()) * 2 + b"garbage\r\n\r\n")
        assert read_all(connection) == b""
        server.call(engine.release.set)
        server.wait_until_idle()
        with server.client() as client:
            assert client.get("/health").status_code == 200
    assert [record.getMessage() for record in caplog.records] == []


def test_garbage_is_not_answered_in_the_place_of_the_request_before_it(loop_factory):
    engine = FakeEngine(hold_after=2)
    with running(engine, loop_factory=loop_factory) as server, connect(server) as connection:
        connection.sendall(request(content=body()))
        server.wait_for(engine.holding)
        connection.sendall(b"garbage\r\n\r\n")
        assert read_all(connection) == b""
        server.wait_for(engine.aborts)


def test_who_leaves_with_two_requests_under_way_leaves_nothing_in_the_log(loop_factory, caplog):
    engine = FakeEngine(hold_after=2)
    with running(engine, loop_factory=loop_factory) as server, caplog.at_level(logging.ERROR):
        with connect(server) as connection:
            connection.sendall(request(content=body(stream=True)) * 2)
            server.wait_for(engine.holding)
        server.wait_for(engine.aborts)
        server.call(engine.release.set)
        server.wait_until_idle()
    assert [record.getMessage() for record in caplog.records] == []


# ── halves ──


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_a_client_that_has_only_no_more_to_send_is_answered(loop_factory, stream, version):
    engine = FakeEngine(hold_after=2)
    with running(engine, loop_factory=loop_factory) as server, connect(server) as connection:
        connection.sendall(request(content=body(stream=stream), version=version))
        server.wait_for(engine.holding)
        connection.shutdown(socket.SHUT_WR)
        server.call(lambda: None)
        server.call(engine.release.set)
        answer = read_all(connection)
        server.wait_until_idle()
    assert engine.aborted == []
    assert statuses(answer)[-1] == 200
    assert answer.rstrip().endswith(b"0" if stream else b"}")
    assert (b"data: [DONE]" in answer) is stream


def test_all_requests_before_the_end_of_a_half_are_answered(server):
    with connect(server) as connection:
        connection.sendall(request(content=body()) * 3)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert [status for status in statuses(answer) if status != 100] == [200] * 3


def test_half_a_request_is_not_answered(server):
    with connect(server) as connection:
        connection.sendall(request(content=body())[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_is_noticed_though_nothing_is_written_to_it(loop_factory, stream):
    engine = FakeEngine(hold_after=2)
    with running(engine, loop_factory=loop_factory) as server:
        with connect(server) as connection:
            connection.sendall(request(content=body(stream=stream)))
            server.wait_for(engine.holding)
        server.wait_for(engine.aborts)
        server.wait_until_idle()
