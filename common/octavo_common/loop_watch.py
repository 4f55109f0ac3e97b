"""How late an event loop is: measured by the loop itself, and by a thread when it stands still.

One blocking call on the loop stops everything on it at once; what did it is in the stacks that are
written down while it lasts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from typing import Self

STALL_S = 1.0  # of standing still: logged
_LOOKS = 5  # of the thread, in the time after which stacks are written


class LoopWatch:
    """Use as `async with`, on the loop that is watched. `lag_s` may be read from any thread.

    A loop that stood still for `stall_s` is logged when it goes on; after `dump_s` the stacks of
    all threads are written to `out` (default: stderr), once for each time. `on_lag` gets the lag
    of each tick. `name`: in log lines, where a process has several loops.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        name: str = "",
        tick_s: float,
        stall_s: float = STALL_S,
        dump_s: float,
        on_lag: Callable[[float], None] = lambda lag_s: None,
        out: IO[str] | None = None,
    ) -> None:
        self.name = name
        self._logger = logger
        self._tick_s = tick_s
        self._stall_s = stall_s
        self._dump_s = dump_s
        self._on_lag = on_lag
        self._out = out
        self._beat_at: float | None = None  # None: nothing is watched
        self._handle: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._stopped.clear()
        self._schedule()
        name = f"{self.name or 'loop'} watch"
        self._thread = threading.Thread(target=self._guard, name=name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._beat_at = None
        self._stopped.set()

    @property
    def lag_s(self) -> float:
        """How long the loop's last sign of life is overdue."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None else max(0.0, time.monotonic() - beat_at - self._tick_s)

    def _schedule(self) -> None:
        self._beat_at = time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._tick_s, self._beat)

    def _beat(self) -> None:
        lag_s = self.lag_s
        self._on_lag(lag_s)
        if lag_s >= self._stall_s:
            loop = {"loop": self.name} if self.name else {}
            fields = {**loop, "seconds": round(lag_s, 3)}
            self._logger.warning("The event loop stood still", extra=fields)
        self._schedule()

    def _guard(self) -> None:
        has_dumped = False
        while not self._stopped.wait(self._dump_s / _LOOKS):
            if self.lag_s < self._dump_s:
                has_dumped = False
            elif not has_dumped:
                has_dumped = True
                out = self._out or sys.__stderr__ or sys.stderr
                faulthandler.dump_traceback(out, all_threads=True)
