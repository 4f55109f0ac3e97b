"""The executor in the engine's own process: one backend, called directly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.backend import LaunchesSteps
from octavo_engine.executor.executor import (
    CountsExpertTokens,
    LosesDevice,
    ReleasesKV,
    ReleasesWeights,
    WarmsUp,
    WatchesWorkers,
)
from octavo_engine.model_runner.runner import ModelRunner
from octavo_engine.profile import Lapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend, BackendLimits, CompileListener
    from octavo_engine.config import SchedulerConfig
    from octavo_engine.errors import WorkerLost
    from octavo_engine.executor.executor import UnderWay
    from octavo_engine.profile import Laps
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult


class UniExecutor:
    """Owns a backend from here on: prepares it for `limits` and `num_blocks`, and closes it."""

    def __init__(
        self,
        backend: Backend,
        *,
        scheduler_config: SchedulerConfig,
        limits: BackendLimits,
        num_blocks: int,
    ) -> None:
        self._backend = backend
        self._is_closed = False
        backend.prepare(limits, num_blocks)
        self._runner = ModelRunner(backend, scheduler_config=scheduler_config, limits=limits)

    @property
    def laps(self) -> Laps | None:
        return self._runner.laps

    @laps.setter
    def laps(self, laps: Laps | None) -> None:
        self._runner.laps = laps
        if isinstance(self._backend, Lapped):
            self._backend.laps = laps

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self._runner.execute(batch)

    @property
    def can_launch(self) -> bool:
        """Whether it is a LaunchesBatches: the backend decides."""
        return isinstance(self._backend, LaunchesSteps)

    @property
    def launch_gains(self) -> bool:
        """Whether launching ahead makes anything faster."""
        return isinstance(self._backend, LaunchesSteps) and not self._backend.launch_waits

    def launch(self, batch: ScheduledBatch) -> UnderWay:
        return self._runner.launch(batch)

    def land(self, under_way: UnderWay) -> StepResult:
        return self._runner.land(under_way)

    def warm_up(self, listener: CompileListener) -> None:
        """Only where the backend compiles."""
        if isinstance(self._backend, WarmsUp):
            self._backend.warm_up(listener)

    def time_picture(self) -> float:
        """0 where the model does not see."""
        return self._runner.time_picture()

    def watch_workers(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Only where the backend is several processes."""
        if isinstance(self._backend, WatchesWorkers):
            self._backend.watch_workers(when_lost)

    def device_is_lost(self) -> bool:
        return isinstance(self._backend, LosesDevice) and self._backend.device_is_lost()

    def expert_rank_tokens(self) -> list[int]:
        if isinstance(self._backend, CountsExpertTokens):
            return self._backend.expert_rank_tokens()
        return []

    def expert_layer_tokens(self) -> list[list[int]]:
        if isinstance(self._backend, CountsExpertTokens):
            return self._backend.expert_layer_tokens()
        return []

    def poison_blocks(self, block_ids: list[int]) -> None:
        self._backend.poison_blocks(block_ids)

    def release_kv(self) -> None:
        """Only where the backend can; a simulated cache takes no memory."""
        if isinstance(self._backend, ReleasesKV):
            self._backend.release_kv()

    def restore_kv(self) -> None:
        if isinstance(self._backend, ReleasesKV):
            self._backend.restore_kv()

    def release_weights(self, *, keep: bool) -> None:
        """Only where they lie in memory of their own; mapped files are the system's to drop."""
        if isinstance(self._backend, ReleasesWeights):
            self._backend.release_weights(keep=keep)

    def restore_weights(self) -> None:
        if isinstance(self._backend, ReleasesWeights):
            self._backend.restore_weights()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._backend.close()
