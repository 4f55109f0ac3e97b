"""The API without a port: requests to the application from the process it is in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo_engine.server.http.buffered_response import BufferedResponse
from octavo_engine.server.http.exchange import IN_BACKGROUND

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

JSON = "application/json"


async def post(
    app: ASGIApp, path: str, body: bytes, *, content_type: str = JSON, is_background: bool = False
) -> BufferedResponse:
    """The whole answer. Cancelling it is what a client does that leaves."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        IN_BACKGROUND: is_background,
        "server": None,
    }
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client stays
        raise AssertionError

    captured = BufferedResponse()
    await app(scope, receive, captured.send)
    return captured
