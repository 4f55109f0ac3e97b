"""The engine of models that pool: whole texts wait, a step takes as many as its budget holds.

Texts lie one behind the other without padding, so a step costs what its tokens cost and they need
no sorting. The first one that waits is in every next step, so none waits longer than those before
it take; later ones fill what room it leaves.

Where a device computes, the next step is packed and launched before the rows of the one before are
finished and sent, so that the device does not wait for the host.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from octavo_engine.backends.pooling import LaunchesTexts, make_step
from octavo_engine.core.pooling.async_pooling import PER_TOKEN, WrongTask
from octavo_engine.core.pooling.postprocess import finish
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    OctavoError,
    QueueFull,
)
from octavo_engine.executor.executor import ReleasesWeights, WarmsUp
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.outputs import EngineStats, SequenceOutput, StepOutput
from octavo_engine.state.pooling import PoolingOutput, PoolingParams, PoolingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.backends.pooling import PendingRows, PoolingBackend, PoolingStep
    from octavo_engine.errors import RequestError
    from octavo_engine.profile import StepProfile
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.pooling import PoolingTask
    from octavo_engine.state.request import EngineRequest

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then something is broken that no request is to blame for
LOOK_AHEAD = 256  # texts that may be passed over to fill a step
_RATE_WEIGHT = 0.2  # of the last step in the running average


class PoolingLimits(NamedTuple):
    """How large things may get."""

    max_model_len: int  # tokens of a text
    max_tokens: int  # of a step
    max_texts: int  # of a step
    max_queue: int  # texts that wait before new ones are refused


class _Launched(NamedTuple):
    """A step that a device is computing."""

    batch: list[PoolingRequest]
    step: PoolingStep
    rows: PendingRows
    started_at: float


class PoolingEngine:
    """A CoreEngine over a model that pools."""

    def __init__(
        self,
        backend: PoolingBackend,
        limits: PoolingLimits,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.heartbeat = Heartbeat(now)
        self.last_step_was_empty = False
        self.profile: StepProfile | None = None
        self._now = now
        self._waiting: dict[str, PoolingRequest] = {}  # in the order they came
        self._waiting_tokens = 0
        self._refused: list[tuple[str, RequestError]] = []
        self._failed_steps = 0
        self._stats = EngineStats()
        self._step_time = StepTimeModel()
        self._launched: _Launched | None = None
        self._landed_at = 0.0  # when the last step's rows were there
        backend.prepare(max_tokens=limits.max_tokens, max_texts=limits.max_texts)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or bool(self._refused) or self._launched is not None

    def add(self, request: EngineRequest) -> None:
        tasks = ", ".join(self.backend.config.tasks)
        raise WrongTask(f"this model cannot generate; it can {tasks}", param="model")

    def add_pooling(self, requests: Sequence[PoolingRequest]) -> None:
        """All of them or none: what came in one call is one queue entry for the limit."""
        if len(self._waiting) >= self.limits.max_queue:
            raise QueueFull(f"{len(self._waiting)} texts wait already", retry_after_s=1)
        for request in requests:
            self._check(request)
        for request in requests:
            self._waiting[request.request_id] = request
            self._waiting_tokens += len(request.token_ids)

    def load_adapter(self, load_id: str, path: str, *, is_pinned: bool = False) -> None:
        raise WrongTask("LoRA adapters are of models that generate", param="lora_name")

    def unload_adapter(self, digest: str) -> None:
        """There are none."""

    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None:
        self._take(request_id)
        return None

    def suspend(self, request_id: str, *, on: bool) -> None:
        """Its answers are small and whole: there is nothing to wait for."""

    def step(self) -> StepOutput:
        """Compute one batch. What a whole step raises fails its texts, not the engine."""
        outputs: list[PoolingOutput] = []
        profile = self.profile
        if profile is not None:
            profile.start_step()
        self._expire()
        batch = self._next_batch()
        self.last_step_was_empty = not batch and self._launched is None
        for request in batch:
            self._take(request.request_id)
        if profile is not None and batch:
            profile.laps.mark("schedule")
        if isinstance(self.backend, LaunchesTexts):
            outputs, batch = self._turn(self.backend, batch)
        elif batch:
            outputs = self._compute(batch)
        stats = self._snapshot()
        if profile is not None and batch:
            profile.laps.mark("compute")
            tokens = sum(len(request.token_ids) for request in batch)
            profile.end_pooling_step(len(batch), tokens, stats)
        return StepOutput(pooled=outputs, stats=stats)

    def record(self, profile: StepProfile | None) -> None:
        self.profile = profile

    def report(self, outputs: list[SequenceOutput]) -> StepOutput:
        return StepOutput(outputs=outputs, stats=self._snapshot())

    def take_refused(self) -> list[tuple[str, RequestError]]:
        refused, self._refused = self._refused, []
        return refused

    def label(self, request_id: str, labels: Labels) -> None:
        """There is no cache whose content could be reported."""

    def watch(self, *, on: bool) -> None:
        """As for labels."""

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, *, on: bool, level: int = 1) -> None:
        """There is no KV cache, but a device may hold weights. With work at hand nothing is
        done."""
        if not isinstance(self.backend, ReleasesWeights) or (on and self.has_work):
            return
        self.heartbeat.pause()
        if on:
            self.backend.release_weights(keep=level == 1)
        else:
            self.backend.restore_weights()

    def warm_up(self) -> None:
        """Compute one text, so that the first request finds memory touched and times known. What
        compiles kernels has compiled them before, as no clock runs yet."""
        if isinstance(self.backend, WarmsUp):
            self.backend.warm_up(self.heartbeat)
        task = cast("PoolingTask", self.backend.config.tasks[0])
        tokens = [0] * min(16, self.limits.max_model_len)
        request = PoolingRequest(
            request_id="warm-up", token_ids=tokens, params=PoolingParams(task=task)
        )
        self.add_pooling([request])
        while self.has_work:
            for output in self.step().pooled:
                if output.error is not None:
                    raise ModelError(f"the model cannot compute: {output.error}")
        self._stats = EngineStats()

    def close(self) -> None:
        self.backend.close()

    def _check(self, request: PoolingRequest) -> None:
        """What would end a whole step rather than this text."""
        config = self.backend.config
        if request.params.task not in config.tasks:
            tasks = ", ".join(config.tasks)
            raise WrongTask(f"this model cannot {request.params.task}; it can {tasks}")
        length = len(request.token_ids)
        if not 1 <= length <= self.limits.max_model_len:
            raise InvalidRequest(
                f"the input has {length} tokens; this model takes 1 to {self.limits.max_model_len}"
            )
        if max(request.token_ids) >= config.body.vocab_size or min(request.token_ids) < 0:
            raise InvalidRequest(f"a token id is not in the vocabulary of {config.body.vocab_size}")
        types = request.type_ids
        if types and (
            len(types) != length or min(types) < 0 or max(types) >= max(config.num_types, 2)
        ):
            raise InvalidRequest("the type ids do not fit the tokens, or the model")

    def _expire(self) -> None:
        """Refuse the texts whose deadline has passed."""
        now = self._now()
        late = [
            request.request_id
            for request in self._waiting.values()
            if request.deadline_at is not None and request.deadline_at <= now
        ]
        for request_id in late:
            self._take(request_id)
            error = DeadlineExceeded("the deadline passed before this text was computed")
            self._refused.append((request_id, error))

    def _next_batch(self) -> list[PoolingRequest]:
        """The first text that waits, and what fits beside it and has the same parameters."""
        batch: list[PoolingRequest] = []
        room = self.limits.max_tokens
        for request in itertools.islice(self._waiting.values(), self.limits.max_texts + LOOK_AHEAD):
            if len(batch) == self.limits.max_texts or room == 0:
                break
            same = not batch or _is_per_token(request) == _is_per_token(batch[0])
            if same and len(request.token_ids) <= room:
                batch.append(request)
                room -= len(request.token_ids)
        return batch

    def _compute(self, batch: list[PoolingRequest]) -> list[PoolingOutput]:
        num_tokens = sum(len(request.token_ids) for request in batch)
        self.heartbeat.expect(self._step_time.prefill_s(num_tokens))
        started = self._now()
        try:
            outputs = self._pool(batch)
            self._failed_steps = 0
        except Exception as error:
            outputs = self._fail(batch, error)
        step_s = self._now() - started
        self._step_time.observe(0, num_tokens, step_s)
        self._note(num_tokens, step_s)
        return outputs

    def _turn(
        self, backend: LaunchesTexts, batch: list[PoolingRequest]
    ) -> tuple[list[PoolingOutput], list[PoolingRequest]]:
        """Launch a step, then wait for the one before: its outputs, and its texts."""
        before, self._launched = self._launched, None
        outputs: list[PoolingOutput] = []
        if batch:
            num_tokens = sum(len(request.token_ids) for request in batch)
            self.heartbeat.expect(self._step_time.prefill_s(num_tokens))
            started_at = self._now()
            try:
                step = self._step_of(batch)
                rows = backend.launch(step, is_per_token=_is_per_token(batch[0]))
                self._launched = _Launched(batch, step, rows, started_at)
            except Exception as error:
                outputs += self._fail(batch, error)
        if before is None:
            return outputs, []
        try:
            outputs += self._finish(before.batch, before.step, before.rows.wait())
            self._failed_steps = 0
        except Exception as error:
            outputs += self._fail(before.batch, error)
        num_tokens = len(before.step.token_ids)
        # It began when it was launched, or when the one before it was done.
        step_s = self._now() - max(before.started_at, self._landed_at)
        self._landed_at = self._now()
        self._step_time.observe(0, num_tokens, step_s)
        self._note(num_tokens, step_s)
        return outputs, before.batch

    def _pool(self, batch: list[PoolingRequest]) -> list[PoolingOutput]:
        step = self._step_of(batch)
        is_per_token = _is_per_token(batch[0])
        rows = self.backend.token_rows(step) if is_per_token else self.backend.pool(step)
        return self._finish(batch, step, rows)

    def _step_of(self, batch: list[PoolingRequest]) -> PoolingStep:
        config = self.backend.config
        # A model without a table of types does not distinguish the texts of a pair.
        with_types = config.num_types > 1
        return make_step(
            [(r.token_ids, r.type_ids if with_types else ()) for r in batch],
            is_last=config.pooling == "last",
        )

    def _finish(
        self, batch: list[PoolingRequest], step: PoolingStep, rows: NDArray[np.float32]
    ) -> list[PoolingOutput]:
        config = self.backend.config
        starts = step.starts.tolist() if _is_per_token(batch[0]) else range(len(batch) + 1)
        finite = np.asarray(np.isfinite(rows).all(axis=1))
        params = batch[0].params
        # Hot path: most steps are of texts that want the same, and finished at once.
        together = None
        if finite.all() and all(request.params == params for request in batch):
            together = finish(rows, params, config)
        outputs = []
        for request, start, end in zip(batch, starts[:-1], starts[1:], strict=True):
            if finite[start:end].all():
                own = (
                    finish(rows[start:end], request.params, config)
                    if together is None
                    else together[start:end]
                )
                data = own.astype("<f4", copy=False).tobytes()
                outputs.append(
                    PoolingOutput(request_id=request.request_id, data=data, rows=end - start)
                )
                continue
            self._stats.nan_failures += 1
            message = "the model's numbers for this text are not finite"
            outputs.append(PoolingOutput(request_id=request.request_id, error=message))
        return outputs

    def _fail(self, batch: list[PoolingRequest], error: Exception) -> list[PoolingOutput]:
        self._failed_steps += 1
        logger.exception("A step failed", extra={"in_a_row": self._failed_steps})
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise OctavoError(
                f"{self._failed_steps} steps in a row failed, the last with "
                f"{type(error).__name__}: {error}"
            ) from error
        message = f"the engine failed to compute a step: {type(error).__name__}"
        return [PoolingOutput(request_id=r.request_id, error=message) for r in batch]

    def _take(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._waiting_tokens -= len(request.token_ids)

    def _note(self, num_tokens: int, step_s: float) -> None:
        stats = self._stats
        stats.steps += 1
        stats.prompt_tokens += num_tokens
        stats.step_tokens = num_tokens
        stats.step_ms = step_s * 1e3
        stats.last_step_at = self._now()
        rate = num_tokens / max(step_s, 1e-6)
        before = stats.prefill_tokens_per_s or rate
        stats.prefill_tokens_per_s = before + _RATE_WEIGHT * (rate - before)

    def _snapshot(self) -> EngineStats:
        stats = self._stats
        stats.num_waiting = len(self._waiting)
        stats.queued_tokens = self._waiting_tokens
        return EngineStats(**{name: getattr(stats, name) for name in stats.__struct_fields__})


def _is_per_token(request: PoolingRequest) -> bool:
    return request.params.task in PER_TOKEN
