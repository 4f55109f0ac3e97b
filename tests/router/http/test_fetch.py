"""The client for the router's own questions, against servers that answer in every wrong way."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from octavo_router.errors import Unreachable
from octavo_router.http.fetch import Connection, FetchTarget
from tests.fakes.facts import run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@asynccontextmanager
async def answering(
    *pieces: bytes | None, ends: bool = False
) -> AsyncIterator[tuple[FetchTarget, list[bytes]]]:
    """Each request gets the pieces one by one; None resets the connection."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in pieces:
                    if piece is None:
                        writer.transport.abort()
                        return
                    writer.write(piece)
                    await writer.drain()
                if ends:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield FetchTarget("127.0.0.1", server.sockets[0].getsockname()[1]), requests


@asynccontextmanager
async def connected(*pieces: bytes | None, ends: bool = False) -> AsyncIterator[Connection]:
    async with answering(*pieces, ends=ends) as (target, _):
        connection = await Connection.open(target)
        async with connection:
            yield connection


def test_two_questions_over_one_connection():
    async def story() -> None:
        async with answering(LONG) as (target, requests):
            async with await Connection.open(target) as connection:
                for _ in range(2):
                    response = await connection.get("/a?b=c", headers={"x": "y"})
                    assert (response.status, response.body) == (200, b"hello")
                    assert connection.is_open
            head = f"GET /a?b=c HTTP/1.1\r\nhost: {target.authority}\r\nx: y\r\n\r\n"
            assert requests == [head.encode()] * 2

    run(story())


@pytest.mark.parametrize(
    "pieces",
    [
        [bytes([byte]) for byte in LONG],
        [b"HTTP/1.1 100 Continue\r\n\r\n", LONG],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"],
    ],
)
def test_an_answer_however_it_is_cut(pieces):
    async def story() -> None:
        async with connected(*pieces) as connection:
            assert (await connection.get("/")).body == b"hello"

    run(story())


def test_a_body_that_ends_with_its_connection():
    async def story() -> None:
        async with connected(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", ends=True) as connection:
            assert (await connection.get("/")).body == b"hello"
            assert not connection.is_open

    run(story())


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "is not HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhell", None], "was closed|reset"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "is not HTTP"),
        ([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000], "head exceeds"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"] * 5000, "head exceeds"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000], "larger than"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhell"], "no answer within 0.2 s"),
        ([None], "was closed|reset"),
    ],
)
def test_a_bad_answer_says_why_and_costs_its_connection(pieces, reason):
    async def story() -> None:
        timeout_s = 0.2 if "no answer" in reason else 20.0
        async with connected(*pieces) as connection:
            with pytest.raises(Unreachable, match=reason):
                await connection.get("/", timeout_s=timeout_s, max_body_bytes=1000)
            assert not connection.is_open
            with pytest.raises(Unreachable, match="is closed"):
                await connection.get("/")

    run(story())


def test_nobody_listens():
    async def story() -> None:
        async with answering() as (target, _):
            pass
        with pytest.raises(Unreachable) as refused:
            await Connection.open(target)
        assert refused.value.is_refused

    run(story())


def test_a_stream_goes_to_its_sink_as_it_comes():
    async def story() -> None:
        got: list[bytes] = []
        head = b"HTTP/1.1 200 OK\r\ncontent-type: A/b; q=1\r\ntransfer-encoding: chunked\r\n\r\n"
        async with connected(head, b"2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n") as connection:
            response = await connection.stream("/", got.append, content_type="a/b")
            assert response.is_stream
            await connection.ended()
            assert b"".join(got) == b"hello"
            assert response.body == b""

    run(story())


def test_an_answer_of_another_type_is_no_stream():
    async def story() -> None:
        got: list[bytes] = []
        async with connected(LONG) as connection:
            response = await connection.stream("/", got.append, content_type="a/b")
            assert (response.is_stream, response.body, got) == (False, b"hello", [])

    run(story())


def test_a_sink_ends_its_stream():
    def sink(data: bytes) -> None:
        raise Unreachable("enough")

    async def story() -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n"
        async with connected(head, b"2\r\nhe\r\n") as connection:
            with pytest.raises(Unreachable, match="enough"):
                await connection.stream("/", sink, content_type="a/b")
                await connection.ended()

    run(story())
