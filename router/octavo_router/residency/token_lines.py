"""Internal lines of event streams, and where events end: slow twin of csrc/router/events.cpp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo_engine.protocol.resume import BEGIN, LINE_PREFIX

if TYPE_CHECKING:
    from octavo_router.residency.api import TokenLine

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_TOKENS = re.compile(rb"([0-9]{1,9})(?: ([0-9]{1,10}(?:,[0-9]{1,10})*))?")
_MAX_TOKEN_ID = 2**32 - 1


def split_token_lines(data: bytes, /) -> tuple[bytes, list[TokenLine], bytes | None]:
    if LINE_PREFIX not in data:
        return data, [], None
    clean = bytearray()
    lines: list[TokenLine] = []
    begin = None
    for match in _LINE.finditer(data):
        line = match.group()
        if not line.startswith(LINE_PREFIX):
            clean += line
            continue
        line = line.rstrip(b"\r\n")
        if line.startswith(BEGIN):
            begin = line[len(BEGIN) :]
        elif line[len(LINE_PREFIX) :][:1].isdigit():
            lines.append(_token_line(line))
        # else a word of a later version, which is not for clients either
    is_clean = len(clean) == len(data)
    return data if is_clean else bytes(clean), lines, begin


def _token_line(line: bytes) -> TokenLine:
    match = _TOKENS.fullmatch(line, len(LINE_PREFIX))
    if match is not None:
        token_ids = [int(digits) for digits in match[2].split(b",")] if match[2] else []
        if max(token_ids, default=0) <= _MAX_TOKEN_ID:
            return int(match[1]), token_ids
    raise ValueError(f"a token line cannot be read: {line[:80]!r}")


def find_event_end(buffer: bytes | bytearray, start: int = 0, /) -> int:
    """An empty line ends an event: a line end right after a line end, or where an event begins."""
    end = start
    at = start
    while at < len(buffer):
        match = _LINE.match(buffer, at)
        assert match is not None  # it matches anything
        next_at = match.end()
        if buffer[next_at - 1] not in b"\r\n":
            break  # the last line has no end yet
        if buffer[at] in b"\r\n":
            end = next_at
        at = next_at
    return end
