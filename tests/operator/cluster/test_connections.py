"""Behind a session nothing is open, whatever the server does and wherever a request was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import weakref
from typing import TYPE_CHECKING

import aiohttp
import pytest

from octavo_operator.cluster.connections import HttpSession, HttpSessions
from octavo_operator.cluster.kube import KubeCluster
from octavo_operator.cluster.kube_config import KubeConfig
from octavo_operator.errors import ClusterUnavailable
from octavo_operator.objects import kinds
from tests.fakes.certificates import make_certificate
from tests.fakes.facts import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

HALF_AN_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"), "127.0.0.1")


@contextlib.contextmanager
def deaf_server(certificate: Path, *, shakes_hands: bool) -> Iterator[int]:
    """It takes connections, tells half an answer, and reads nothing: no farewell is returned."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, certificate.with_suffix(".key"))
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if shakes_hands:
                    connection = tls.wrap_socket(connection, server_side=True)
                    connection.sendall(HALF_AN_ANSWER)
                kept.append(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)
        for connection in kept:
            connection.close()


def test_a_request_stopped_within_its_answer_leaves_no_socket(certificate):
    """It is cancelled; its connection says farewell to a server that does not listen."""

    async def story(session: HttpSession, port: int) -> list[socket.socket]:
        has_begun = asyncio.Event()
        asking = asyncio.create_task(ask(session, port, has_begun))
        await has_begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        return list(session._sockets)

    with deaf_server(certificate, shakes_hands=True) as port:
        assert asyncio.run(left_open(certificate, port, story)) == []
        gc.collect()  # an open transport of a loop that has ended is a warning, and a failure


def test_a_session_that_ends_while_a_request_connects_leaves_no_socket(certificate):
    """Nobody cancels it: the server takes the connection and never shakes hands."""
    requested: list[asyncio.Task[None]] = []

    async def story(session: HttpSession, port: int) -> list[socket.socket]:
        requested.append(asyncio.create_task(ask(session, port, asyncio.Event())))
        await until(lambda: len(session._sockets) == 1)
        return list(session._sockets)

    async def main(port: int) -> None:
        assert await left_open(certificate, port, story) == []
        async with asyncio.timeout(60):
            with pytest.raises(aiohttp.ClientError):  # and it is told, at once
                await requested[0]

    with deaf_server(certificate, shakes_hands=False) as port:
        asyncio.run(main(port))
        gc.collect()


def test_nothing_is_kept_of_sessions_that_others_have_closed():
    """A login every ten minutes would add one for as long as the operator runs."""

    async def story() -> None:
        async with HttpSessions() as sessions:
            kept = []
            for _ in range(3):
                session = HttpSession()
                await sessions.keep(session)
                kept.append(weakref.ref(session))
                await session.http.close()
                del session
            gc.collect()
            assert [each() is None for each in kept] == [True, True, False]
            last = HttpSession()
            await sessions.keep(last)
        assert last.http.closed

    asyncio.run(story())


@pytest.mark.parametrize("shakes_hands", [True, False])
def test_a_server_that_never_answers_is_worth_another_try(certificate, shakes_hands):
    async def main(port: int) -> None:
        config = KubeConfig(
            server=f"https://127.0.0.1:{port}", ca_pem=certificate.read_text(), token="t"
        )
        async with KubeCluster(config, field_manager="x", timeout_s=0.5) as cluster:
            async with asyncio.timeout(60):
                with pytest.raises(ClusterUnavailable, match="GET /api/v1/namespaces/n/pods/p: "):
                    await cluster.get(kinds.POD, "n", "p")

    with deaf_server(certificate, shakes_hands=shakes_hands) as port:
        asyncio.run(main(port))
        gc.collect()


async def ask(session: HttpSession, port: int, has_begun: asyncio.Event) -> None:
    async with session.http.get(f"https://127.0.0.1:{port}") as answer:
        has_begun.set()
        await answer.read()


async def left_open(
    certificate: Path,
    port: int,
    story: Callable[[HttpSession, int], Awaitable[list[socket.socket]]],
) -> list[socket.socket]:
    """Of the sockets that the story saw, those that are open right behind the session."""
    async with HttpSession(tls=ssl.create_default_context(cafile=certificate)) as session:
        seen = await story(session, port)
        assert len(seen) == 1
    return [each for each in seen if each.fileno() >= 0]
