"""The library's messages for a grammar's author."""

from __future__ import annotations

_MAX_REASON = 300
_DEAD_END = "NoExtensionBias"  # how the library says that no token may follow
_NO_TEXT = (
    "no text satisfies it at some point: a rule or schema needs itself without an end, or "
    "contradicts itself"
)


def is_dead_end(reason: str) -> bool:
    """Whether the message says that no token may follow."""
    return _line(reason) == _DEAD_END


def explained(reason: str) -> str:
    """The library's message for the grammar's author: one line, bounded."""
    return _NO_TEXT if is_dead_end(reason) else _line(reason)[:_MAX_REASON]


def _line(reason: str) -> str:
    return " ".join(reason.replace("<non-verbose/>", "").split())
