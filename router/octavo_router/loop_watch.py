"""How late the event loop is: measured by the loop itself, and by a thread when it stands still."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from octavo_router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

TICK_S = 0.1
STALL_S = 1.0  # of standing still: counted
DUMP_S = 5.0  # and written down: every thread's stack


class LoopWatch:
    """Use as `async with LoopWatch(metrics)`. `lag_s` is for liveness: it grows while we stand."""

    def __init__(self, metrics: RouterMetrics, *, tick_s: float = TICK_S) -> None:
        self._metrics = metrics
        self._tick_s = tick_s
        self._beat_at = time.monotonic()
        self._handle: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="loop watch", daemon=True)

    async def __aenter__(self) -> Self:
        self._beat_at = time.monotonic()
        self._schedule()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._stopped.set()

    @property
    def lag_s(self) -> float:
        """How long the loop's last sign of life is overdue. Readable from any thread."""
        return max(0.0, time.monotonic() - self._beat_at - self._tick_s)

    def _schedule(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._tick_s, self._beat)

    def _beat(self) -> None:
        lag_s = self.lag_s
        self._metrics.loop_lag.observe(lag_s)
        if lag_s >= STALL_S:
            self._metrics.process.loop_stalls += 1
            logger.warning("The event loop stood still", extra={"seconds": round(lag_s, 3)})
        self._beat_at = time.monotonic()
        self._schedule()

    def _guard(self) -> None:
        has_dumped = False
        while not self._stopped.wait(STALL_S):
            if self.lag_s < DUMP_S:
                has_dumped = False
            elif not has_dumped:
                has_dumped = True
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
