"""Threads that may take their time: the step loop's come first where cores are scarce."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICENESS = 10


def yield_to_others() -> None:
    """Lower the calling thread's priority; only Linux has one for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
