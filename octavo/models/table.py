"""Plain columns, as `octavo list` and `octavo ps` print them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def columns(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def size_text(num_bytes: float) -> str:
    """In units of 1000, as hubs and package indexes count."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def age_text(since: float, now: float | None = None) -> str:
    """How long ago: 5 s, 12 min, 3 h, 2 days."""
    seconds = max(0.0, (time.time() if now is None else now) - since)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
