"""Stages that are simulated: each computes one step at a time, and as many are under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.ranks import exchange_seconds, stage_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.sim.clock import Clock
    from octavo_engine.config import EngineConfig
    from octavo_engine.sampling.batch import Sampled, SamplingBatch


class SimLaunched(NamedTuple):
    """A step on its way through the stages."""

    stages: SimStages
    done_at: float
    sampling: SamplingBatch
    row_seeds: NDArray[np.uint64]

    def wait(self) -> Sampled:
        return self.stages.finish(self)


class SimStages(SimBackend):
    """A model whose layers are divided between stages. The first one has most to do."""

    launch_waits = False

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self.num_stages = config.pipeline_parallel_size
        self._exchange_s = exchange_seconds(config.sim)
        self._free_at = [0.0] * self.num_stages

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> SimLaunched:
        """Each stage begins once it has done with the step before, and has its rows."""
        alone_s = self.seconds_alone(step, sampling)
        at = self._clock.now()
        for stage, own_s in enumerate(stage_seconds(self._config, alone_s)):
            at = max(at, self._free_at[stage]) + own_s
            self._free_at[stage] = at
            at += self._exchange_s
        return SimLaunched(self, at, sampling, self._adapter_seeds(step))

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        return self.launch(step, sampling).wait()

    def finish(self, launched: SimLaunched) -> Sampled:
        self._row_seeds = launched.row_seeds
        sampled = self._sample(launched.sampling)
        self._clock.sleep(launched.done_at - self._clock.now())
        self._rank_loss.check()
        return sampled
