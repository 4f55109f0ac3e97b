"""A rank of a simulated group that ends or hangs after a set time, each time it is started."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from octavo_engine.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.sim.clock import Clock
    from octavo_engine.config import EngineConfig

PATIENCE_S = 10.0  # for which real ranks wait for each other


class RankLoss:
    """Real ranks are noticed in the same ways: one that ends at once, also while nothing is
    computed; one that hangs by a step that waits for it."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self._clock = clock
        scale = config.sim.time_scale
        self._ends_s = config.sim.rank_ends_s * scale
        self._hangs_s = config.sim.rank_hangs_s * scale
        self._patience_s = PATIENCE_S * scale
        rank = random.randrange(1, max(2, config.num_ranks))  # rank 0 is the engine core itself
        self._name = f"rank {rank} of {config.num_ranks}"
        self._began_at = clock.now()
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """All ranks are there."""
        self._began_at = self._clock.now()

    def check(self) -> None:
        """After a step: raises WorkerLost where a rank did not take part in it."""
        lived_s = self._clock.now() - self._began_at
        if 0 < self._ends_s <= lived_s:
            raise self._ended()
        if 0 < self._hangs_s <= lived_s:
            self._clock.sleep(self._patience_s)
            raise WorkerLost(f"{self._name} hangs: the others waited for it for {PATIENCE_S:.0f} s")

    def watch(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Call it, on a thread of its own, when a rank ends."""
        if self._ends_s > 0:
            left_s = self._began_at + self._ends_s - self._clock.now()
            self._timer = threading.Timer(max(0.0, left_s), when_lost, [self._ended()])
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ended(self) -> WorkerLost:
        return WorkerLost(f"{self._name} was ended by SIGKILL")
