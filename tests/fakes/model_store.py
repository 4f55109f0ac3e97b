"""A server that holds a model's files and misbehaves as a test sets it, over real sockets."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass
class StoreRequest:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes = b""


@dataclass
class StoreReply:
    """One answer. A `blob` is served in ranges."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    blob: bytes | None = None


@dataclass
class Store:
    """`routes` come first; then `files` by path."""

    files: dict[str, bytes] = field(default_factory=dict)
    routes: dict[str, Callable[[StoreRequest], StoreReply | None]] = field(default_factory=dict)
    requested: list[StoreRequest] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # each breaks one answer after so many bytes
    stalls: list[int] = field(default_factory=list)  # as a cut, but the connection stays open
    knows_ranges: bool = True
    etag: str = ""  # default: of the content
    on_answer: Callable[[StoreRequest], None] = lambda requested: None
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, requested: StoreRequest) -> StoreReply:
        for prefix, route in self.routes.items():
            if requested.path.startswith(prefix) and (reported := route(requested)) is not None:
                return reported
        content = self.files.get(unquote(requested.path))
        return StoreReply(404) if content is None else StoreReply(blob=content)

    def ranges(self) -> list[str]:
        return [
            requested.headers["range"]
            for requested in self.requested
            if "range" in requested.headers
        ]


def hold_hub_model(
    store: Store, repository: str, files: Mapping[str, bytes], commit: str, revision: str = "main"
) -> None:
    """A repository as the hub has it: its list of files, and each of them at that commit."""
    siblings = [
        {"rfilename": name, "size": len(content)}
        | (
            {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}}
            if len(content) > 1000
            else {}
        )
        for name, content in files.items()
    ]
    listed = json.dumps({"sha": commit, "siblings": siblings}).encode()

    def info(requested: StoreRequest) -> StoreReply:
        if not requested.path.startswith(f"/api/models/{repository}/"):
            return StoreReply(401, headers={"x-error-code": "RepoNotFound"})
        if requested.path != f"/api/models/{repository}/revision/{revision}":
            return StoreReply(404, headers={"x-error-code": "RevisionNotFound"})
        return StoreReply(body=listed)

    store.routes["/api/models/"] = info
    for name, content in files.items():
        store.files[f"/{repository}/resolve/{commit}/{name}"] = content


@contextmanager
def serving(store: Store) -> Iterator[Store]:
    server = _Server(("127.0.0.1", 0), store)
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], store: Store) -> None:
        self.store = store
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that leaves is what many tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.close_connection = True
        parts = urlsplit(self.path)
        length = int(self.headers.get("content-length", 0))
        requested = StoreRequest(
            self.command,
            parts.path,
            {name: values[0] for name, values in parse_qs(parts.query).items()},
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(length),
        )
        store = self.server.store
        store.requested.append(requested)
        store.on_answer(requested)
        reported = store.answer(requested)
        body, status, headers = reported.body, reported.status, dict(reported.headers)
        if reported.blob is not None:
            status, body, more = self._range(requested, reported.blob)
            headers = {**more, **headers}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        self.end_headers()
        if reported.blob is not None and len(body) and (store.cuts or store.stalls):
            cuts = store.cuts or store.stalls
            is_stall = not store.cuts
            at = cuts.pop(0)
            self._send(body[:at])
            if is_stall:
                store.released.wait(30)
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(body)

    def _send(self, body: bytes) -> None:
        with suppress(OSError):
            self.wfile.write(body)
            self.wfile.flush()

    def _range(self, requested: StoreRequest, blob: bytes) -> tuple[int, bytes, dict[str, str]]:
        store = self.server.store
        etag = store.etag or f'"{hashlib.sha256(blob).hexdigest()[:16]}"'
        span = requested.headers.get("range", "")
        condition = requested.headers.get("if-range", etag)
        if not store.knows_ranges or not span or condition != etag:
            return 200, blob, {"etag": etag}
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(blob))
        if start >= len(blob):
            return 416, b"", {"content-range": f"bytes */{len(blob)}"}
        reported = {"etag": etag, "content-range": f"bytes {start}-{end - 1}/{len(blob)}"}
        return 206, blob[start:end], reported
