"""Behind a session nothing is open, whatever the server does and wherever a request was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest

from octavo_operator.connections import Session
from tests.fakes.certificates import make_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
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
        thread.join(5)
        for connection in kept:
            connection.close()


def test_a_request_stopped_within_its_answer_leaves_no_socket(certificate):
    with deaf_server(certificate, shakes_hands=True) as port:
        asyncio.run(stop_a_request(certificate, port, after_begin=True))
        gc.collect()  # an open transport of a loop that has ended is a warning, and a failure


def test_a_request_stopped_while_it_connects_leaves_no_socket(certificate):
    with deaf_server(certificate, shakes_hands=False) as port:
        asyncio.run(stop_a_request(certificate, port, after_begin=False))
        gc.collect()


async def stop_a_request(certificate: Path, port: int, *, after_begin: bool) -> None:
    has_begun = asyncio.Event()

    async def ask() -> None:
        async with session.http.get(f"https://127.0.0.1:{port}") as answer:
            has_begun.set()
            await answer.read()

    async with Session(tls=ssl.create_default_context(cafile=certificate)) as session:
        asking = asyncio.create_task(ask())
        if after_begin:
            await has_begun.wait()
        else:
            while not session._sockets:  # noqa: ASYNC110  # nobody tells when it connects
                await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
