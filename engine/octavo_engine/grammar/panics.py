"""The library's own failures: they come as exceptions that are no `Exception`."""

from __future__ import annotations


def is_failure(error: BaseException) -> bool:
    """Whether this may end the request at hand; an interrupt or an exit may not be caught."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
