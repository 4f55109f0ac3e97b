"""Methods of vLLM's `LLM` beside generation: sleep, metrics, a queue; and those that do not exist
here, which raise an error that names what to do instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from octavo_engine.errors import InvalidRequest, OctavoError
from octavo_engine.metrics import EngineMetrics, MetricsSnapshot
from octavo_engine.state.outputs import EngineStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.offline.engine import OfflineEngine
    from octavo_engine.core.offline.lora_request import LoRARequest
    from octavo_engine.core.offline.prompts import Prompt
    from octavo_engine.core.text.output_processor import SettledSubmission
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One gauge or counter, under the name that `/metrics` has."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class VLLMMethods:
    """What `LLM` adds for callers that come from vLLM."""

    _engine: OfflineEngine
    _info: ModelInfo
    _enqueued: list[SettledSubmission]
    _is_asleep = False

    def _check_open(self) -> None:
        raise NotImplementedError

    def _submissions(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        first: int = 0,
    ) -> list[SettledSubmission]:
        raise NotImplementedError

    def _run(
        self, submissions: Sequence[SettledSubmission], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        raise NotImplementedError

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the KV cache, and on a GPU that of the weights: level 1 keeps
        them on the host, 2 reads them again. Cached prefixes are forgotten."""
        self._check_open()
        if level not in (1, 2):
            raise InvalidRequest(f"level must be 1 or 2; got {level!r:.20}", param="level")
        if self._enqueued:
            raise InvalidRequest("prompts are enqueued: call wait_for_completion first")
        if not self._is_asleep:
            self._engine.sleep(on=True, level=level)
            self._is_asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; everything wakes, whichever `tags` are given."""
        self._check_open()
        if self._is_asleep:
            self._engine.sleep(on=False)
            self._is_asleep = False

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise OctavoError("this LLM sleeps; call wake_up first")

    def get_metrics(self) -> list[MetricValue]:
        """The engine's gauges and counters. Histograms are of requests over HTTP."""
        self._check_open()
        stats = self._engine.report([]).stats or EngineStats()
        now = MetricsSnapshot(stats, "ready", is_sleeping=self._is_asleep)
        metrics = EngineMetrics(self._info.names[0], lambda: now)
        return [
            MetricValue(sample.name, sample.value, dict(sample.labels))
            for family in metrics.registry.collect()
            if family.type in ("gauge", "counter")
            for sample in family.samples
        ]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[str]:
        """Checks the prompts, to be computed by `wait_for_completion`. Their request ids."""
        self._check_open()
        added = self._submissions(prompts, sampling_params, lora_request, len(self._enqueued))
        self._enqueued += added
        return [submission.request_id for submission in added]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """The answers to everything that was enqueued, in that order."""
        self._check_open()
        self._check_awake()
        submissions, self._enqueued = self._enqueued, []
        return self._run(submissions, use_tqdm=use_tqdm)

    def collective_rpc(self, method: object, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported."""
        raise OctavoError(
            "LLM.collective_rpc is not supported: workers run no code of callers. "
            "reset_prefix_cache, sleep, wake_up and start_profile are methods of LLM"
        )

    def apply_model(self, func: object) -> NoReturn:
        """Not supported."""
        raise OctavoError(
            "LLM.apply_model is not supported: on a CPU there is no torch module. "
            "docs/adding-a-model.md shows how a model of one's own is written"
        )
