"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

_PLENTY: Final = 65536  # where nothing bounds them


def raise_file_limit(wanted: int | None = None) -> int:
    """Let this process, and those that it starts from now on, have `wanted` files open; without it,
    as many as its hard limit allows. What is allowed already stays.

    Returns how many it may have now, which are fewer where the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = hard != resource.RLIM_INFINITY
    if wanted is None:
        wanted = hard if is_bounded else _PLENTY
    if soft == resource.RLIM_INFINITY:
        return wanted
    new = min(wanted, hard) if is_bounded else wanted
    if new > soft:
        with suppress(OSError, ValueError):  # some systems have a lower bound that they do not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
            soft = new
    return soft
