"""A plain HTTP server in a thread, for programs that are tested as processes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def handled(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
