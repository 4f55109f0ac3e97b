"""A server that answers as LMCache's own (`python -m lmcache.v1.server`) does."""

from __future__ import annotations

import socketserver
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_CALL, _REPLY = struct.Struct("9i150s"), struct.Struct("9i")


class LMCacheServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blocks: dict[bytes, tuple[tuple[int, ...], bytes]] = {}

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    server: LMCacheServer

    def handle(self) -> None:
        while len(call := self.rfile.read(_CALL.size)) == _CALL.size:
            command, length, form, dtype, _, *shape, key = _CALL.unpack(call)
            name = key.rstrip()
            parts = name.decode().split("@")
            assert len(parts) == 5 and parts[4] == "uint8" and int(parts[3], 16) >= 0, parts
            if command == 1:
                self.server.blocks[name] = (form, dtype, *shape), self.rfile.read(length)
                continue
            about, data = self.server.blocks.get(name, ((1, 2, 0, 0, 0, 0), b""))
            code = 200 if name in self.server.blocks else 400
            size = len(data) if command == 2 else 0
            self.wfile.write(_REPLY.pack(code, size, *about, 0))
            if command == 2:
                self.wfile.write(data)


@contextmanager
def lmcache_server() -> Iterator[LMCacheServer]:
    with LMCacheServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
