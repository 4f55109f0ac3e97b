"""The engine: schedule, compute, take in the result. One thread owns it; nothing in it waits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo_engine.core.heartbeat import Heartbeat
from octavo_engine.errors import ModelError, OctavoError
from octavo_engine.sampling.processors import ProcessorRegistry
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.outputs import EngineStats, SequenceOutput, StepOutput, StepResult
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.executor.executor import Executor
    from octavo_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then something is broken that no request is to blame for
_COUNTERS = (
    "steps", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions",
    "nan_failures",
)  # fmt: skip


class Engine:
    """Requests in, steps on demand, news of sequences out."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.heartbeat = Heartbeat(now)
        self.last_step_was_empty = False
        self._now = now
        self._processors = ProcessorRegistry()
        self._live: set[str] = set()  # request ids taken in and not finished
        self._failed_steps = 0
        self._warm_up_stats = EngineStats()  # not part of what users count

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Take a request in. Raises RequestError: it is full, or this one can never be served."""
        self._processors.resolve(request.params.logits_processors)
        self.scheduler.add(request)
        self._live.add(request.request_id)

    def abort(self, request_id: str) -> SequenceOutput | None:
        """End a sequence now, wherever it stands. Unknown or finished: None."""
        self._live.discard(request_id)
        return self.scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """Compute one batch. What a whole step raises fails the sequences in it, not the engine."""
        batch = ScheduledBatch()
        try:
            batch = self.scheduler.schedule()
            outputs = [] if batch.is_empty else self._compute(batch)
            self._failed_steps = 0
        except Exception as error:
            outputs = self._fail(batch, error)
        outputs += self.scheduler.take_finished()
        self._live.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        self.last_step_was_empty = batch.is_empty
        return StepOutput(outputs=outputs, stats=self.stats())

    def stats(self) -> EngineStats:
        stats, before = self.scheduler.stats(), self._warm_up_stats
        for counter in _COUNTERS:
            setattr(stats, counter, getattr(stats, counter) - getattr(before, counter))
        return stats

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds memory touched and times known."""
        length = min(16, self.scheduler.config.max_model_len - 2)
        if length < 1:
            return
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.add(EngineRequest(request_id="warm-up", prompt_token_ids=[0] * length, params=params))
        while self.has_work:
            for output in self.step().outputs:
                if output.finish_reason == "error":
                    raise ModelError(f"the model cannot compute: {output.error}")
        self.reset_prefix_cache()
        self._warm_up_stats = self.scheduler.stats()

    def close(self) -> None:
        self.executor.close()

    def _compute(self, batch: ScheduledBatch) -> list[SequenceOutput]:
        self.heartbeat.expect(batch.num_tokens)
        started = self._now()
        result = self.executor.execute(batch)
        step_s = self._now() - started
        self.heartbeat.learn(batch.num_tokens, step_s)
        return self.scheduler.update(batch, result, step_s)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[SequenceOutput]:
        """End what was being computed; if not even that is known, end all there is."""
        self._failed_steps += 1
        logger.exception("A step failed", extra={"in_a_row": self._failed_steps})
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise OctavoError(
                f"{self._failed_steps} steps in a row failed, the last with "
                f"{type(error).__name__}: {error}"
            ) from error
        failed = [s.request_id for s in batch.sequences] or sorted(self._live)
        message = f"the engine failed to compute a step: {type(error).__name__}"
        outputs = [
            SequenceOutput(request_id=request_id, finish_reason="error", error=message)
            for request_id in failed
            if self.scheduler.abort(request_id) is not None
        ]
        if not batch.is_empty:  # rows of what was just ended are free once the batch is settled
            self.scheduler.update(batch, StepResult([-1] * len(batch.sequences)), 0.0)
        return outputs
