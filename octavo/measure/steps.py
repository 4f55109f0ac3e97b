"""Times single steps of an engine in this process: a batch that decodes, a prompt, a long context.

The engine is the whole one, scheduler and all; there is no HTTP and no text. Prompts are random and
new every time, so that no cache has them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.report import random_prompts
from octavo.measure.work import WorkStep
from octavo_engine.errors import OctavoError
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo_engine.core.engine import Engine
    from octavo_engine.core.info import ModelInfo

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Timed:
    """A step, and how long it takes: the median of several."""

    step: WorkStep
    seconds: float


class Stepper:
    """Gives work to an engine and looks at the clock. The engine must have none besides."""

    def __init__(self, engine: Engine, info: ModelInfo, *, seed: int = 0) -> None:
        self._engine = engine
        self._info = info
        self._seed = seed
        self._count = 0

    def decode(self, num_sequences: int, context: int, num_steps: int) -> Timed:
        """Steps in which each of `num_sequences`, about `context` tokens long, gets one more."""
        last = WARM_UP_STEPS + num_steps
        prompt_len = max(1, context - last)
        # Some begin while others still compute their prompt: room for their answers to grow.
        ids = self._add(num_sequences, prompt_len, self._info.max_model_len - prompt_len)
        seconds: list[float] = []
        while len(seconds) < last:
            elapsed_s, num_tokens = self._step()
            if num_tokens == num_sequences:  # all decode, and nothing else is computed
                seconds.append(elapsed_s)
        for request_id in ids:
            self._engine.abort(request_id)
        self._drain()
        return Timed(
            WorkStep.decode(num_sequences, prompt_len + last // 2),
            statistics.median(seconds[WARM_UP_STEPS:]),
        )

    def prefill(self, length: int, rounds: int) -> Timed:
        """One prompt from its first step to its first token."""
        seconds = []
        for _ in range(rounds + 1):
            self._add(1, length, 1)
            started_at = time.perf_counter()
            self._drain()
            seconds.append(time.perf_counter() - started_at)
        return Timed(WorkStep.prefill(length), statistics.median(seconds[1:]))

    def _add(self, count: int, prompt_len: int, max_tokens: int) -> list[str]:
        self._seed += 1
        prompts = random_prompts(self._seed, count, prompt_len, self._info.vocab_size)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        ids = []
        for prompt in prompts:
            self._count += 1
            ids.append(f"measured-{self._count}")
            self._engine.add(
                EngineRequest(request_id=ids[-1], prompt_token_ids=prompt, params=params)
            )
        return ids

    def _step(self) -> tuple[float, int]:
        """How long it took, and the tokens it computed."""
        started_at = time.perf_counter()
        report = self._engine.step()
        elapsed_s = time.perf_counter() - started_at
        for output in report.outputs:
            if output.finish_reason == "error":
                raise OctavoError(f"the engine failed while it was measured: {output.error}")
        assert report.stats is not None  # of a step there always are
        return elapsed_s, report.stats.step_tokens

    def _drain(self) -> None:
        while self._engine.has_work:
            self._step()
