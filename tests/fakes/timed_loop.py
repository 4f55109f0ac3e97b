"""A scheduler in virtual time: what sequences cost, and how long others wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.state.batch import ScheduledBatch


class TimedLoop(Loop):
    """A step takes a base, and so much for each token; the clock goes with it."""

    BASE_S, ROW_S, PREFILL_S = 0.005, 0.001, 0.0005

    def __init__(self, num_blocks: int, **config: Any) -> None:
        self.clock = ManualClock()
        scheduler = Scheduler(SchedulerConfig(**config), num_blocks=num_blocks, now=self.clock)
        super().__init__(scheduler)
        self.durations: list[float] = []
        self.between = self._pass_time
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> str:
        request = make_request(prompt, max_tokens=max_tokens, **fields)
        self.scheduler.add(request)
        self.prompts[request.request_id] = (prompt, max_tokens)
        return request.request_id

    def _pass_time(self, batch: ScheduledBatch) -> None:
        rows = batch.num_decodes
        self.step_s = self.BASE_S + self.ROW_S * rows + self.PREFILL_S * (batch.num_tokens - rows)
        self.durations.append(self.step_s)
        self.clock.advance(self.step_s)

    def until(self, *request_ids: str) -> float:
        """Seconds until these are done."""
        began_at = self.clock()
        while not all(id_ in self.reasons for id_ in request_ids):
            self.step()
        return self.clock() - began_at

    def check(self) -> None:
        """All outputs are the truth."""
        self.run()
        for request_id, (prompt, count) in self.prompts.items():
            assert self.outputs[request_id] == true_output(prompt, count)
