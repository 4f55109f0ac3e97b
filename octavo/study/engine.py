"""A simulated engine: the true scheduler, KV pool and prefix cache; steps of a modelled length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.study.publisher import Publisher
from octavo_engine.kv.restore import place_blocks, wanted_blocks
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.outputs import StepResult
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.study.engine_models import EngineModel
    from octavo.study.timeline import Timeline
    from octavo_engine.protocol.stream import Delta
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import SequenceOutput


class SimulatedEngine:
    """Computes in virtual time. What a step yields is known at its end, not before."""

    def __init__(
        self,
        model: EngineModel,
        timeline: Timeline,
        *,
        on_outputs: Callable[[Sequence[SequenceOutput]], None],
        deliver: Callable[[Delta], None],
        signal_delay_s: float,
    ) -> None:
        self.scheduler = Scheduler(
            model.scheduler,
            num_blocks=model.sim.kv_blocks,
            cache_key=b"study",
            now=timeline.clock,
        )
        self.busy_s = 0.0
        self.num_prefilled_tokens = 0  # computed to catch up, after preemption again
        self._model = model
        self._timeline = timeline
        self._on_outputs = on_outputs
        self._publisher = Publisher(
            self.scheduler,
            timeline,
            deliver,
            delay_s=signal_delay_s,
            max_queue=model.scheduler.max_queue,
        )
        self._answers: dict[str, range] = {}
        self._is_busy = False

    def submit(
        self, request_id: str, prompt: list[int], answer: range, labels: Labels | None, *,
        is_fetched: bool = False,
    ) -> None:  # fmt: skip
        """`is_fetched`: the prompt's KV cache has come from another engine. Raises RequestError:
        it is full, or this one can never be served."""
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, temperature=0.0)
        self.scheduler.add(
            EngineRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, labels=labels
            )
        )
        if is_fetched:
            self._take_blocks(request_id)
        self._answers[request_id] = answer
        if not self._is_busy:
            # Not at once: others may arrive in the same moment, and share the step.
            self._is_busy = True
            self._timeline.after(0.0, self._begin_step)

    def label(self, request_id: str, labels: Labels) -> None:
        """Labels for an answer that has just ended."""
        self.scheduler.kv.residency.label(request_id, labels)
        self._publisher.on_change()

    def _take_blocks(self, request_id: str) -> None:
        """As many as there is room for; the others are computed."""
        kv = self.scheduler.kv
        sequence = next(one for one in self.scheduler.waiting if one.request_id == request_id)
        _, turns = wanted_blocks(kv, sequence, lambda digest, group: True)
        place_blocks(kv, sequence, turns)

    def _begin_step(self) -> None:
        batch = self.scheduler.schedule()
        if batch.is_empty:
            assert not self.scheduler.has_work, "the scheduler is stuck"
            self._is_busy = False
            return
        num_decodes = batch.num_decodes
        num_tokens = batch.num_tokens
        step_s = self._model.step_s(
            num_decodes=num_decodes, num_prefill_tokens=num_tokens - num_decodes
        )
        self.busy_s += step_s
        if num_tokens > len(batch.counts) or batch.admitted:
            self.num_prefilled_tokens += sum(
                count
                for sequence, count in zip(batch.sequences, batch.counts, strict=True)
                if sequence.num_tokens - sequence.num_computed_tokens > 1
                or sequence in batch.admitted
            )
        self._timeline.after(step_s, lambda: self._end_step(batch, step_s))

    def _end_step(self, batch: ScheduledBatch, step_s: float) -> None:
        answers = self._answers
        tokens = [
            answers[sequence.request_id][sequence.num_output_tokens] if samples else -1
            for sequence, samples in zip(batch.sequences, batch.samples, strict=True)
        ]
        outputs = self.scheduler.update(batch, StepResult(tokens), step_s)
        for output in outputs:
            if output.finish_reason is not None:
                del answers[output.request_id]
        self._publisher.on_change(step_s)
        self._on_outputs(outputs)
        self._begin_step()
