"""Ctrl-C where an exception in the middle of anything would be lost, or leave something behind."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, and acted upon where the caller looks; a second one acts at once. Python
    raises it wherever the main thread is, and drops it within a destructor or a callback."""
    seen = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield seen.is_set  # signals are handled elsewhere
        return
    before = signal.getsignal(signal.SIGINT)

    def note(_signal: int, _frame: object) -> None:
        seen.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)
