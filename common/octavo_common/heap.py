"""What the C library keeps of memory that was freed. Only glibc can be made to give it back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def give_memory_back() -> None:
    """Make it return to the system what it keeps for later."""
    if (trim := _trim()) is not None:
        trim(0)


def can_give_back() -> bool:
    return _trim() is not None


@cache
def _trim() -> Callable[[int], int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None), "malloc_trim", None)
