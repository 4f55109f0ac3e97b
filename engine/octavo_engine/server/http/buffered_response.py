"""An answer that is read here instead of being sent: one request that is made out of another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Message


class BufferedResponse:
    """Takes what an ASGI application sends."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self._chunks.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        return b"".join(self._chunks)

    def json(self) -> Any:
        return json.loads(self.body)
