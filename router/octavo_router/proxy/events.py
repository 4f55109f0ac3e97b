"""A stream of events on its way to the client: whole events only, so that it can end cleanly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from octavo_router.errors import is_anthropic
from octavo_router.proxy.token_stream import EventCutter

if TYPE_CHECKING:
    from octavo_router.errors import Rejected
    from octavo_router.residency.api import FindEventEnd

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b":\n\n"  # a client's parser drops it
_TAIL_BYTES: Final = 1024
_RESPONSES: Final = "/v1/responses"


class EventRelay:
    """Lets whole events pass as they are, and keeps the beginning of the next."""

    __slots__ = ("_cutter", "is_done", "num_events", "tail")

    def __init__(self, find_event_end: FindEventEnd, *, max_bytes: int) -> None:
        self._cutter = EventCutter(find_event_end, limit=max_bytes)
        self.tail = b""
        self.num_events = 0
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        data = self._cutter.push(data)
        if not data:
            return data
        self.num_events += data.count(b"data:")
        self.tail = data if len(data) > _TAIL_BYTES else self.tail[-_TAIL_BYTES:] + data
        if b"[DONE]" in data and b"data: [DONE]" in data:
            self.is_done = True
        return data

    def end(self) -> bytes:
        """An event that the end of the answer cut off is dropped."""
        self._cutter.clear()
        return b""


def error_events(error: Rejected, path: str = "", request_id: str = "") -> bytes:
    """How a stream that had begun says that it failed, in the words of its path's clients."""
    body = error.body(path, request_id)
    if is_anthropic(path):
        return b"event: error\ndata: " + body + b"\n\n"
    if path == _RESPONSES:
        # No number: what passed was not read, and clients do not ask for one of an error.
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    return b"data: " + body + b"\n\n" + DONE


def error_events_of(body: bytes, error: Rejected, path: str = "", request_id: str = "") -> bytes:
    """An engine's error object inside a stream; `error` if what it sent is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or "error" not in value:
        return error_events(error, path, request_id)
    if path != _RESPONSES and not is_anthropic(path):
        return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" + DONE
    return b"event: error\ndata: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
