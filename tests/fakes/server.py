"""The API server over a fake engine, on a loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from octavo_engine.server.admin.reload import KeyFiles, Reloader
from octavo_engine.server.app import build_admin_app, build_app
from octavo_engine.server.http.listen import open_port, open_unix_socket
from octavo_engine.server.http.tls import TlsFiles
from octavo_engine.server.run import make_server
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from octavo_engine.server.service import Service


_PATIENCE_S = 60.0  # ends tests that have gone wrong; a machine that does much else is slow


@dataclass
class RunningServer:
    """A server that answers, and its insides."""

    url: str
    port: int
    engine: FakeEngine
    service: Service
    loop: asyncio.AbstractEventLoop
    reloader: Reloader
    admin_url: str = ""  # of the administrators' listener, where there is one

    def look_at_files(self) -> None:
        """What it would do within two seconds anyway."""
        self.call(self.reloader.look)

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=_PATIENCE_S, **kwargs)

    def admin(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.admin_url, timeout=_PATIENCE_S, **kwargs)

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """To a POST, which must be answered with 200."""
        with self.client() as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def wait_for(self, event: asyncio.Event) -> None:
        """Blocks the test until something has happened on the server's loop."""
        asyncio.run_coroutine_threadsafe(event.wait(), self.loop).result(_PATIENCE_S)

    def wait_until_idle(self) -> None:
        """An answer may be read before the server has put its request away."""
        asyncio.run_coroutine_threadsafe(self.service.admission.idle(), self.loop).result(
            _PATIENCE_S
        )
        assert self.service.admission.in_flight == 0

    def call(self, function: Callable[[], Any]) -> None:
        done = threading.Event()

        def work() -> None:
            function()
            done.set()

        self.loop.call_soon_threadsafe(work)
        assert done.wait(_PATIENCE_S)

    def raw(self, data: bytes, *, until_closed: bool = True) -> bytes:
        """What comes back for these very bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE_S) as connection:
            connection.sendall(data)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
                if not until_closed and b"\r\n\r\n" in answer:
                    break
            return answer


def post(path: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """A request as bytes, whose connection ends with its answer."""
    lines = [
        f"POST {path} HTTP/1.1", "host: localhost", "connection: close",
        f"content-length: {len(body)}", *headers,
    ]  # fmt: skip
    if content_type:
        lines.append(f"content-type: {content_type}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def running(
    engine: FakeEngine | None = None,
    settings: ServerSettings | None = None,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[RunningServer]:
    engine = engine or FakeEngine()
    settings = settings or ServerSettings()
    if settings.uds:
        listener = open_unix_socket(settings.uds)
        port = 0
    else:
        listener = open_port("127.0.0.1", 0)
        port = listener.getsockname()[1]
    scheme = "https" if settings.ssl_certfile else "http"
    admin_listener = open_port("127.0.0.1", 0) if settings.admin_port else None
    admin_url = ""
    if admin_listener is not None:
        admin_url = f"{scheme}://127.0.0.1:{admin_listener.getsockname()[1]}"
    started = threading.Event()
    parts: dict[str, Any] = {}

    async def work() -> None:
        key_files = KeyFiles(settings)
        tls = TlsFiles(settings) if settings.ssl_certfile else None
        app = build_app(engine, settings, key_files)
        server = make_server(app, settings, tls)
        servers = {server: listener}
        if admin_listener is not None:
            admin = make_server(build_admin_app(app.state.service), settings, tls)
            servers[admin] = admin_listener
        parts.update(
            servers=tuple(servers), service=app.state.service, loop=asyncio.get_running_loop()
        )
        parts["reloader"] = Reloader([key_files, *([tls] if tls else [])])
        started.set()
        await asyncio.gather(*(server.serve(sockets=[own]) for server, own in servers.items()))
        if app.state.service.batches is not None:
            await app.state.service.batches.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(_PATIENCE_S)
    try:
        yield RunningServer(
            f"{scheme}://127.0.0.1:{port}",
            port,
            engine,
            parts["service"],
            parts["loop"],
            parts["reloader"],
            admin_url,
        )
    finally:
        for server in parts["servers"]:
            parts["loop"].call_soon_threadsafe(server.leave)
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()
