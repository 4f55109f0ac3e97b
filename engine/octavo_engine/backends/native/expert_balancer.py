"""Moves experts between ranks when some have had more rows to compute than others."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo_engine.backends.native.expert_balance import balance, first_slots, rank_loads

if TYPE_CHECKING:
    from octavo_engine import _native
    from octavo_engine.backends.native.shard import Shard
    from octavo_engine.config import EplbConfig

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """One rank's. All ranks count the rows of all experts and take the same steps, so each decides
    for itself, in the same step, and they come to the same."""

    def __init__(self, config: EplbConfig, program: _native.Program, shard: Shard) -> None:
        self._config = config
        self._program = program
        self._shard = shard
        self._num_steps = 0
        self._before = program.expert_tokens()  # when the window began
        self._slots = [
            first_slots(len(slots), len(experts))
            for slots, experts in zip(program.slot_tokens(), self._before, strict=True)
        ]

    def after_step(self) -> None:
        """Between two steps. Raises RuntimeError where another rank has failed."""
        self._num_steps += 1
        into_interval = self._num_steps % self._config.step_interval
        if into_interval == 0:
            self._rebalance()
        if into_interval == self._config.first_step_of_window:
            self._before = self._program.expert_tokens()

    def _rebalance(self) -> None:
        began = time.monotonic()
        size = self._shard.size
        windows = [
            [now - before for now, before in zip(*layer, strict=True)]
            for layer in zip(self._program.expert_tokens(), self._before, strict=True)
        ]
        now = [balance(rows, own, size) for rows, own in zip(windows, self._slots, strict=True)]
        moved = sum(
            old != new
            for layer in zip(self._slots, now, strict=True)
            for old, new in zip(*layer, strict=True)
        )
        was, self._slots = self._slots, now
        if moved:
            self._program.move_experts(now)
        if self._shard.rank:
            return  # all ranks would log the same
        if moved:
            logger.info("Moved %d experts between ranks in %.0f ms",
                        moved, 1000 * (time.monotonic() - began))  # fmt: skip
        if self._config.log_balancedness:
            logger.info("Expert balancedness (1: all ranks compute as many rows): %.2f, now %.2f",
                        *(_balancedness(windows, slots, size) for slots in (was, now)))  # fmt: skip


def _balancedness(windows: list[list[int]], slots: list[list[int]], size: int) -> float:
    """What ranks have to do on average, of what the busiest one of each layer has; as in vLLM."""
    loads = [rank_loads(rows, own, size) for rows, own in zip(windows, slots, strict=True)]
    most = sum(max(each) for each in loads)
    return sum(sum(each) for each in loads) / size / most if most else 1.0
