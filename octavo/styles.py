"""Whether a stream takes colours and bold type."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO


def has_styles(out: IO[str]) -> bool:
    """A terminal does, unless NO_COLOR is set or TERM is dumb."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dimmed(text: str, out: IO[str]) -> str:
    """What is said about an answer, apart from it."""
    return f"\x1b[2m{text}\x1b[0m" if has_styles(out) else text
