"""How much memory this process has: what a grammar takes is seen by how that grows."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def address_space_bytes() -> int:
    """0 where the system does not say."""
    return _pages(0)


def resident_bytes() -> int:
    """0 where the system does not say."""
    return _pages(1)


def _pages(field: int) -> int:
    with suppress(OSError):
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[field]) * resource.getpagesize()
    return 0
