"""What one request says to metrics and to its trace as its outputs pass.

Times of tokens are those at which they came from the core, so that an answer that is sent whole is
measured as one that is streamed. Gaps between outputs are a matter of streams only: they are
measured where the bytes leave.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_engine import tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
    from octavo_engine.metrics import EngineMetrics
    from octavo_engine.server.generation.job import Job
    from octavo_engine.state.sampling_params import SamplingParams
    from octavo_engine.tracing import RequestTimeline, Value

Place = tuple[int, int]  # prompt and answer


class RequestTiming:
    """Of one request. Hot path: once per output."""

    def __init__(
        self, metrics: EngineMetrics, job: Job, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._job = job
        self._now = now
        self._arrived_at = now()
        self._started_at: dict[int, float] = {}  # the first step of a prompt
        self._first_at: dict[Place, float] = {}
        self._last_at: dict[Place, float] = {}
        self._most_tokens = 0
        ended = sum(resumed.ended for resumed in job.resumed)
        self._unfinished = len(job.prompts) * job.params.n - ended
        for ids in job.prompts:
            metrics.prompt_tokens.observe(len(ids))
        metrics.params_n.observe(job.params.n)
        if job.params.max_tokens is not None:
            metrics.params_max_tokens.observe(job.params.max_tokens)
        trace = tracing.current()
        self._timeline = None if trace is None else self._begin(trace.timeline)

    def note(self, prompt_index: int, result: RequestOutput) -> None:
        now = self._now()
        if result.queued_s is not None and prompt_index not in self._started_at:
            self._start(prompt_index, result, result.queued_s)
        for output in result.outputs:
            place = (prompt_index, output.index)
            if output.token_ids:
                last_at = self._last_at.get(place)
                if last_at is None:
                    self._first(place, output.first_at or now)
                else:
                    self._metrics.inter_token_latency.observe(now - last_at)
                self._last_at[place] = now
            if output.finish_reason is not None:
                self._finish(place, output, output.last_at or now)

    def refuse(self) -> None:
        """It was no request that could be served: nothing of it finishes."""
        self._unfinished = 0

    def give_up(self, reason: str) -> None:
        """Count what did not finish; a second call finds nothing left."""
        self._metrics.finished[reason] += self._unfinished
        if self._unfinished and self._timeline is not None:
            self._timeline.finish_reasons.append(reason)
        self._unfinished = 0

    def _begin(self, timeline: RequestTimeline) -> RequestTimeline:
        timeline.arrived_at = timeline.arrived_at or self._arrived_at
        timeline.input_tokens += self._job.prompt_tokens
        timeline.request.update(_requested(self._job.params))
        return timeline

    def _start(self, prompt_index: int, result: RequestOutput, queued_s: float) -> None:
        metrics, timeline = self._metrics, self._timeline
        started_at = self._started_at[prompt_index] = self._arrived_at + queued_s
        metrics.queue_time.observe(queued_s)
        num_tokens = len(self._job.prompts[prompt_index])
        metrics.prefill_computed_tokens.observe(num_tokens - result.num_cached_tokens)
        if timeline is not None:
            timeline.started_at = min(timeline.started_at or started_at, started_at)
            timeline.cached_tokens += result.num_cached_tokens

    def _first(self, place: Place, at: float) -> None:
        """An answer's first token came."""
        metrics, timeline = self._metrics, self._timeline
        self._first_at[place] = at
        if place[1] == 0:
            metrics.time_to_first_token.observe(at - self._arrived_at)
            started_at = self._started_at.get(place[0])
            if started_at is not None:
                metrics.prefill_time.observe(max(0.0, at - started_at))
        if timeline is not None and not timeline.first_at:
            timeline.first_at = at

    def _finish(self, place: Place, output: CompletionOutput, at: float) -> None:
        metrics, timeline = self._metrics, self._timeline
        reason, num_tokens = str(output.finish_reason), output.num_tokens
        self._unfinished -= 1
        metrics.finished[reason] = metrics.finished.get(reason, 0) + 1
        metrics.generation_tokens.observe(num_tokens)
        metrics.e2e_latency.observe(self._now() - self._arrived_at)
        first_at = self._first_at.get(place)
        if first_at is not None:
            new_tokens = num_tokens - self._resumed_tokens(place)
            metrics.decode_time.observe(at - first_at)
            if new_tokens > 1:
                metrics.time_per_output_token.observe((at - first_at) / (new_tokens - 1))
        started_at = self._started_at.get(place[0])
        if started_at is not None:
            metrics.inference_time.observe(max(0.0, at - started_at))
        self._most_tokens = max(self._most_tokens, num_tokens)
        if self._unfinished == 0:
            metrics.max_generation_tokens.observe(self._most_tokens)
        if timeline is not None:
            timeline.output_tokens += num_tokens
            timeline.finish_reasons.append(reason)
            timeline.last_at = max(timeline.last_at, at)

    def _resumed_tokens(self, place: Place) -> int:
        """Tokens of an answer that another engine has made."""
        resumed = self._job.resumed
        return len(resumed[place[0] * self._job.params.n + place[1]].token_ids) if resumed else 0


def _requested(params: SamplingParams) -> dict[str, Value]:
    """What was requested, in numbers only: stop strings and the like are the client's words."""
    attributes: dict[str, Value | None] = {
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
    }
    return {key: value for key, value in attributes.items() if value is not None}
