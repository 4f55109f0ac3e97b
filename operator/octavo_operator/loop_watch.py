"""How late an event loop is: measured from a thread of its own, so that it can tell of a loop that
stands still.

One blocking call on the loop stops every watch, lease and probe at once; what did it is in the
stacks that are written down while it lasts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

logger = logging.getLogger("octavo.operator.loop")

TICK_S = 0.25
STALL_S = 1.0  # of standing still: every thread's stack is written down
MAX_LAG_S = 20.0  # and then liveness fails


class LoopWatch:
    """Use as `async with`, on the loop that is watched. `lag_s` may be read from any thread."""

    def __init__(
        self,
        name: str,
        *,
        stall_s: float = STALL_S,
        tick_s: float = TICK_S,
        out: IO[str] | None = None,
    ) -> None:
        self.name = name
        self._stall_s = stall_s
        self._tick_s = tick_s
        self._out = out
        self._beat_at: float | None = None  # None: nothing is watched
        self._handle: asyncio.TimerHandle | None = None
        self._ended = threading.Event()

    @property
    def lag_s(self) -> float:
        """How long the loop's last sign of life is overdue."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None else max(0.0, time.monotonic() - beat_at - self._tick_s)

    async def __aenter__(self) -> Self:
        self._ended.clear()
        self._beat()
        threading.Thread(target=self._guard, name=f"{self.name} watch", daemon=True).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._beat_at = None
        self._ended.set()

    def _beat(self) -> None:
        if (lag_s := self.lag_s) >= self._stall_s:
            told = {"loop": self.name, "seconds": round(lag_s, 3)}
            logger.warning("The event loop stood still", extra=told)
        self._beat_at = time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(self._tick_s, self._beat)

    def _guard(self) -> None:
        has_dumped = False
        while not self._ended.wait(self._tick_s):
            if self.lag_s < self._stall_s:
                has_dumped = False
            elif not has_dumped:
                has_dumped = True
                out = self._out or sys.__stderr__ or sys.stderr
                faulthandler.dump_traceback(out, all_threads=True)
