"""A rank of a simulated group that ends or hangs in a set step, each time it is started."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from octavo_engine.errors import WorkerLost

if TYPE_CHECKING:
    from octavo_engine.backends.sim.clock import Clock
    from octavo_engine.config import EngineConfig

PATIENCE_S = 10.0  # for which real ranks wait for each other


class RankLoss:
    """Counts steps, not seconds: how quick a machine is changes nothing."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self._sim, self._clock = config.sim, clock
        rank = random.randrange(1, max(2, config.num_ranks))  # rank 0 is the engine core itself
        self._name = f"rank {rank} of {config.num_ranks}"
        self._num_steps = 0

    def check(self) -> None:
        """After each step: raises WorkerLost where a rank did not take part in it."""
        self._num_steps += 1
        if self._num_steps == self._sim.rank_ends_at_step:
            raise WorkerLost(f"{self._name} was ended by SIGKILL")
        if self._num_steps == self._sim.rank_hangs_at_step:
            self._clock.sleep(PATIENCE_S * self._sim.time_scale)
            raise WorkerLost(f"{self._name} hangs: the others waited for it for {PATIENCE_S:.0f} s")
