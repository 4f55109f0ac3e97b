"""Chooses the compiled hot path, or its slow twin where that was not built."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from octavo_engine.protocol.route_keys import VERSION
from octavo_router.residency import index, scan, token_lines, underway, usage

if TYPE_CHECKING:
    from octavo_router.residency.api import (
        FindEventEnd,
        FindUsage,
        MakeIndex,
        MakeUnderway,
        ScanFunction,
        SplitTokenLines,
    )


@dataclass(frozen=True, slots=True)
class HotPath:
    """The functions that every request or chunk goes through."""

    scan: ScanFunction
    ResidencyIndex: MakeIndex
    Underway: MakeUnderway
    split_token_lines: SplitTokenLines
    find_event_end: FindEventEnd
    find_usage: FindUsage
    problem: str = ""  # why it is the slow one, for the log; "" for the compiled one

    @property
    def is_native(self) -> bool:
        return not self.problem


def load() -> HotPath:
    """The compiled hot path if it is there and makes the same keys, else the one in Python."""
    try:
        fast = import_module("octavo_router._fast")
    except ImportError as error:
        return in_python(f"octavo_router._fast cannot be imported: {error}")
    if fast.ROUTE_KEYS_VERSION != VERSION:
        return in_python("octavo_router._fast was built for other route keys; build it again")
    try:
        return HotPath(
            fast.scan,
            fast.ResidencyIndex,
            fast.Underway,
            fast.split_token_lines,
            fast.find_event_end,
            fast.find_usage,
        )
    except AttributeError as error:
        return in_python(f"octavo_router._fast is older than this ({error}); build it again")


def in_python(reason: str) -> HotPath:
    return HotPath(
        scan.scan,
        index.PyResidencyIndex,
        underway.PyUnderway,
        token_lines.split_token_lines,
        token_lines.find_event_end,
        usage.find_usage,
        problem=reason,
    )
