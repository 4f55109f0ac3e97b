"""Patterns with look-ahead at their beginning, taken apart: no automaton has look-around."""

from __future__ import annotations

from typing import NamedTuple


class Lookahead(NamedTuple):
    inner: str
    is_negative: bool


class PatternParts(NamedTuple):
    """`plain` matches more than the whole pattern does: the look-aheads leave some texts out."""

    lookaheads: list[Lookahead]
    plain: str


def without_lookahead(pattern: str) -> PatternParts | None:
    """Of `^(?!…)(?=…)…`; None where it has no such beginning."""
    if not pattern.startswith("^"):
        return None
    rest = pattern[1:]
    found: list[Lookahead] = []
    while rest.startswith(("(?!", "(?=")):
        end = _end_of_group(rest)
        if end is None or rest[end : end + 1] in ("*", "+", "?", "{"):
            return None
        found.append(Lookahead(rest[3 : end - 1], is_negative=rest[2] == "!"))
        rest = rest[end:]
    # An alternative to all of it would not begin with the look-aheads.
    if not found or "|" in rest:
        return None
    return PatternParts(found, "^" + rest)


def _end_of_group(text: str) -> int | None:
    """The place behind the bracket that closes the one which `text` begins with."""
    depth, at, in_class = 0, 0, False
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return at + 1
        at += 1
    return None
