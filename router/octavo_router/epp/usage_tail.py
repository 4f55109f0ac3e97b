"""Finds an answer's token counts while it passes in pieces of any size, keeping a kilobyte."""

from __future__ import annotations

from typing import Final

from octavo_router.residency.usage import PyUsage, find_usage

_MARK: Final = b'"usage":'
_MAX_BYTES: Final = 1040  # of the object, with its name


class UsageTail:
    """Feed it all pieces in order; `usage` is that of the last object there was."""

    __slots__ = ("_carry", "_window")

    def __init__(self) -> None:
        self._carry = b""  # what may be the beginning of the mark
        self._window = b""  # from the latest mark on

    def feed(self, piece: bytes) -> None:
        """Hot path: once per piece of an answer."""
        data = self._carry + piece
        at = data.rfind(_MARK)
        if at >= 0:
            self._window = data[at : at + _MAX_BYTES]
        elif self._window and len(self._window) < _MAX_BYTES:
            self._window += piece[: _MAX_BYTES - len(self._window)]
        self._carry = data[1 - len(_MARK) :]

    @property
    def usage(self) -> PyUsage:
        return find_usage(self._window)
