"""What is searched: a reader of outside bytes, with valid inputs and its ways to refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# Reads one input and asserts what must hold of it. Files lie in the folder.
Read: TypeAlias = "Callable[[bytes], object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileParser:
    """`open` imports what is needed, so that each child process loads one parser."""

    open: Callable[[Path], tuple[Read, Sequence[bytes], tuple[type[BaseException], ...]]]
    words: tuple[bytes, ...] = ()
    json_share: float = 0.0
    growth_mib: int = 64  # of the resident memory, once all seeds were read
    peak_mib: int = 192  # above that, at any time
