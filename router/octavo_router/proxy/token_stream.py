"""Cuts an engine's event stream into whole events, however the bytes arrive, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.errors import RouterError

if TYPE_CHECKING:
    from octavo_router.residency.api import FindEventEnd

MAX_EVENT_BYTES = 2**20


class MalformedStream(RouterError):
    """An engine's stream breaks the rules of its form: nothing more of it may be relayed."""


class EventCutter:
    """Holds back the last event until it is whole: a client gets all of an event or nothing."""

    __slots__ = ("_find_event_end", "_limit", "_line_at", "_rest")

    def __init__(self, find_event_end: FindEventEnd, *, limit: int = MAX_EVENT_BYTES) -> None:
        self._find_event_end = find_event_end
        self._limit = limit
        self._rest = bytearray()
        self._line_at = 0  # where the last line of the rest begins: all before it was looked at

    def push(self, data: bytes) -> bytes:
        """All events that are whole with these bytes. Hot path: once per read from a socket.

        Raises StreamError for an event above the limit.
        """
        rest = self._rest
        whole = b""
        if not rest:  # nearly always
            end = self._find_event_end(data, 0)
            if end == len(data):
                return data
            whole = data[:end]
            rest += data[end:]
        else:
            rest += data
            is_line = b"\n" in data or b"\r" in data
            end = self._find_event_end(rest, self._line_at) if is_line else 0
            if end > self._line_at:
                whole = bytes(rest[:end])
                del rest[:end]
            elif not is_line:
                self._check()
                return whole
        self._line_at = rest.rfind(b"\n") + 1
        self._check()
        return whole

    def clear(self) -> None:
        self._rest.clear()
        self._line_at = 0

    def _check(self) -> None:
        if len(self._rest) > self._limit:
            raise MalformedStream(f"an event is larger than {self._limit} bytes")
