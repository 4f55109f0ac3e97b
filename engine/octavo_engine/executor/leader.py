"""Rank 0 of several: a backend that has the other ranks compute each step with it.

The runner sees one backend. It samples here; the others get the step as a `StepPlan` and know
nothing of requests, grammars or tokens to come.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from octavo_engine import _native
from octavo_engine.backends.backend import GathersSteps
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.rank_devices import check_devices
from octavo_engine.backends.registry import build_gathering_rank, build_rank
from octavo_engine.backends.step_plan import StepPlan, max_plan_bytes
from octavo_engine.errors import GatherFailed, WorkerLost
from octavo_engine.executor import messages
from octavo_engine.executor.commands import (
    ALIVE_S,
    BARRIER_PATIENCE_S,
    DEVICE_PATIENCE_S,
    Command,
)
from octavo_engine.executor.executor import LosesDevice, ReleasesKV, WarmsUp
from octavo_engine.executor.measured_stages import settle_partition
from octavo_engine.executor.rank_adapters import LeadingAdapters, placing
from octavo_engine.executor.rank_nodes import RankNodes
from octavo_engine.executor.rank_processes import RankProcesses
from octavo_engine.executor.stage_rows import StageRows, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo_engine.backends.backend import (
        BackendLimits,
        BackendStep,
        CompileListener,
        RankBackend,
    )
    from octavo_engine.backends.native.backend import NativeBackend
    from octavo_engine.caches import CacheLayout
    from octavo_engine.config import EngineConfig
    from octavo_engine.executor.rank_adapters import RankedAdapter
    from octavo_engine.profile import Laps
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.weights.adapter import AdapterFiles
    from octavo_engine.weights.source import ModelFiles

RankT = TypeVar("RankT", bound="RankBackend")

LOOK_S = 0.25  # so often a wait for another stage looks whether all ranks are there


def start_ranks(
    config: EngineConfig,
    files: ModelFiles,
    progress: Callable[[int, int], None] | None = None,
    *,
    patience_s: float | None = None,
) -> Leader:
    """As many processes as `config.num_ranks` says, this one included; each loads its part of the
    model. Raises ConfigError, ModelError and WorkerLost; then none is left."""
    if patience_s is None:
        patience_s = DEVICE_PATIENCE_S if config.device == "cuda" else BARRIER_PATIENCE_S
    check_devices(config)
    is_pipeline = config.pipeline_parallel_size > 1
    if is_pipeline:
        config = settle_partition(config, files)
    local = config.replace(model=str(files.path.absolute()), revision=None)
    if is_pipeline:
        place_of(local, 0)  # before processes are started for what cannot be
    processes: RankProcesses
    if config.distributed_executor_backend == "ray":
        from octavo_engine.executor.ray_nodes import RayNodes

        processes = RayNodes(config, patience_s, files)
        local = processes.config.replace(model=local.model, revision=None)
    elif local.nnodes > 1:
        processes = RankNodes(local, patience_s, files)
    else:
        processes = RankProcesses(local, patience_s)
    try:
        if is_pipeline:
            stage = place_of(local, 0)
            leader: Leader = PipelineLeader(
                build_rank(local, files, stage=stage, progress=progress), processes
            )
        else:
            place = RankPlace(Shard(0, processes.size), processes.memory_file, patience_s)
            if config.device in ("cuda", "torch"):
                gathering = build_gathering_rank(local, files, place, progress=progress)
                leader = GatheringLeader(gathering, processes)
            else:
                leader = TensorLeader(build_rank(local, files, place, progress=progress), processes)
        processes.expect(messages.WorkerLoaded)
    except BaseException:
        processes.close()
        raise
    return leader


class LeadingBackend(ABC, Generic[RankT]):
    """A Backend over rank 0's own and the processes of the others; owns both."""

    def __init__(self, backend: RankT, processes: RankProcesses) -> None:
        self._backend = backend
        self._processes = processes
        self._ring: _native.Ring | None = None
        self._adapters = LeadingAdapters(processes)
        self._when_lost: Callable[[WorkerLost], None] | None = None
        processes.on_lost = self._on_lost
        if processes.lost is not None:
            raise processes.lost

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    @property
    def cache_layout(self) -> CacheLayout:
        return self._backend.cache_layout

    @property
    def kv_bytes_per_block(self) -> int:
        return self._backend.kv_bytes_per_block

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return self._backend.kv_memory(limits, fraction)

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        num_groups = len(self.cache_layout.groups)
        slot_bytes = 1 + max_plan_bytes(limits, num_groups)
        size = self._processes.size
        self._ring = _native.Ring(0, size, self._processes.ring_file, slot_bytes)
        row_bytes = self._row_bytes(limits)
        self._processes.send(messages.PrepareWorker(limits, num_blocks, slot_bytes, row_bytes))
        self._backend.prepare(limits, num_blocks)
        self._processes.expect(messages.WorkerPrepared)

    def _row_bytes(self, limits: BackendLimits) -> int:
        """Of the most rows that go between stages."""
        return 4 * self._backend.config.hidden_size * limits.max_tokens

    @abstractmethod
    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        """With all ranks. Raises WorkerLost."""

    @abstractmethod
    def _put(self, ring: _native.Ring, message: bytes) -> None:
        """Into the ring, once there is room. Raises WorkerLost."""

    def poison_blocks(self, block_ids: list[int]) -> None:
        for first in range(0, len(block_ids), 512):  # a message has its bounds
            ids = np.array(block_ids[first : first + 512], np.int32)
            self._tell(Command.POISON, ids.tobytes())
        self._backend.poison_blocks(block_ids)

    def device_is_lost(self) -> bool:
        """The one of this rank: where another's is, that rank ends."""
        return isinstance(self._backend, LosesDevice) and self._backend.device_is_lost()

    def release_kv(self) -> None:
        if isinstance(self._backend, ReleasesKV):
            self._tell(Command.RELEASE_KV)
            self._backend.release_kv()

    def restore_kv(self) -> None:
        if isinstance(self._backend, ReleasesKV):
            self._tell(Command.RESTORE_KV)
            self._backend.restore_kv()

    def watch_workers(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Call it, on any thread, when a rank has ended; at once if one has."""
        self._when_lost = when_lost
        if self._processes.lost is not None:
            when_lost(self._processes.lost)

    def close(self) -> None:
        self._processes.close()
        self._ring = None
        self._backend.close()

    def _tell_step(self, step: BackendStep) -> bytes:
        """Its plan, which the other ranks have."""
        for body in self._adapters.take_unused():
            self._tell(Command.FORGET_ADAPTERS, body)
        plan = StepPlan.of(step).encode()
        self._tell(Command.STEP, plan)
        return plan

    def _tell(self, command: Command, body: bytes = b"") -> None:
        assert self._ring is not None, "prepare() comes first"
        self._put(self._ring, command.message(body))

    def _on_lost(self, rank: int, error: WorkerLost) -> None:
        if self._when_lost is not None:
            self._when_lost(error)

    def _hangs(self, rank: int) -> WorkerLost:
        """Who ended; or, if none did, that this one hangs."""
        if self._processes.lost is not None:
            return self._processes.lost
        return WorkerLost(
            f"{self._processes.name_of(rank)} hangs: the others waited for it for "
            f"{self._processes.patience_s:.0f} s"
        )


class NativeLeader(LeadingBackend["NativeBackend"]):
    """Over ranks of the native backend."""

    @property
    def laps(self) -> Laps | None:
        return self._backend.laps

    @laps.setter
    def laps(self, laps: Laps | None) -> None:
        self._backend.laps = laps

    def pack_adapter(self, files: AdapterFiles) -> RankedAdapter:
        """On all ranks; not on the thread of the steps. Raises ModelError and WorkerLost."""
        return self._adapters.pack(files, self._backend.pack_adapter)

    def set_adapter(self, slot: int, packed: RankedAdapter | None) -> None:
        """On all ranks, for the steps from now on."""
        self._tell(Command.PLACE_ADAPTER, placing(slot, packed))
        self._place_own(slot, None if packed is None else packed.own)

    def _place_own(self, slot: int, packed: _native.PackedAdapter | None) -> None:
        self._backend.set_adapter(slot, packed)

    def expert_rank_tokens(self) -> list[int]:
        return self._backend.expert_rank_tokens()

    def expert_layer_tokens(self) -> list[list[int]]:
        return self._backend.expert_layer_tokens()


class TensorLeader(NativeLeader):
    """Of ranks that share each layer. It samples from logits that all of them wrote."""

    def __init__(self, backend: NativeBackend, processes: RankProcesses) -> None:
        assert backend.ranks is not None, "it is one of several"
        self._ranks = backend.ranks
        super().__init__(backend, processes)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        self._tell_step(step)
        try:
            return self._backend.execute(step, sampling)
        except RuntimeError as error:
            if self._ranks.failed < 0:
                raise
            raise self._hangs(self._ranks.failed) from error

    def _put(self, ring: _native.Ring, message: bytes) -> None:
        if self._ranks.failed >= 0:
            raise self._hangs(self._ranks.failed)
        if not ring.put(message, self._processes.patience_s):
            self._ranks.fail(ring.slowest)
            raise self._hangs(self._ranks.failed)

    def _on_lost(self, rank: int, error: WorkerLost) -> None:
        self._ranks.fail(rank)
        super()._on_lost(rank, error)


class GatheringLeader(LeadingBackend[GathersSteps]):
    """Of ranks of the torch backends, which show each other what they compute."""

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        with self._gathering():
            self._tell_step(step)
            return self._backend.execute(step, sampling)

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        with self._gathering():
            super().prepare(limits, num_blocks)

    def warm_up(self, listener: CompileListener) -> None:
        """All ranks, which gather in these steps too. Only where they compile."""
        if not isinstance(self._backend, WarmsUp):
            return
        with self._gathering():
            self._tell(Command.WARM_UP)
            self._backend.warm_up(listener)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """While all ranks must come to the same gathers. Raises WorkerLost where one does not."""
        heard = self._processes.heard()
        try:
            yield
        except GatherFailed as error:
            raise self._absent(heard) from error

    def _absent(self, heard: list[int]) -> WorkerLost:
        """Who did not come to a gather. The socket of a rank that died may be seen a moment after
        the gather failed; one that hangs sends no sign of life meanwhile."""
        for _ in range(round(2.5 * ALIVE_S / LOOK_S)):
            if self._processes.lost is not None:
                return self._processes.lost
            time.sleep(LOOK_S)
        now = self._processes.heard()
        silent = [rank for rank in range(1, self._processes.size) if now[rank] == heard[rank]]
        if silent:
            return self._hangs(silent[0])
        return WorkerLost(
            f"the {self._processes.size} ranks hang: not all of them came to a gather within "
            f"{self._processes.patience_s:.0f} s, and all of their processes run"
        )

    def _put(self, ring: _native.Ring, message: bytes) -> None:
        if self._processes.lost is not None:
            raise self._processes.lost
        if not ring.put(message, self._processes.patience_s):
            slowest = ring.slowest
            self._backend.ranks.fail()
            raise self._hangs(slowest)

    def _on_lost(self, rank: int, error: WorkerLost) -> None:
        self._backend.ranks.fail()
        super()._on_lost(rank, error)


class LaunchedStep(NamedTuple):
    """A step on its way through the stages."""

    leader: PipelineLeader
    number: int
    step: BackendStep
    sampling: SamplingBatch

    def wait(self) -> Sampled:
        return self.leader.finish(self.number, self.step, self.sampling)


class PipelineLeader(NativeLeader):
    """Of stages, of which it is the last. A stage may compute for as long as a step takes, so none
    is given up but one that ends, or whose process is not heard of."""

    def __init__(self, backend: NativeBackend, processes: RankProcesses) -> None:
        self._rows: StageRows | None = None
        self._num_launched = self._num_taken = self._num_counts = 0
        # What slots get before the launched step of that number is finished here.
        self._to_place: deque[tuple[int, int, _native.PackedAdapter | None]] = deque()
        super().__init__(backend, processes)

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        config, columns = self._processes.config, self._backend.config.hidden_size
        files = self._processes.row_files
        self._rows = StageRows(place_of(config, 0), files, self._row_bytes(limits), columns)
        super().prepare(limits, num_blocks)

    @property
    def launch_waits(self) -> bool:
        return False

    @property
    def num_stages(self) -> int:
        return self._processes.size

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        return self.launch(step, sampling).wait()

    def launch(self, step: BackendStep, sampling: SamplingBatch) -> LaunchedStep:
        """The first stages compute it while steps before it are finished here."""
        plan = self._tell_step(step)
        self._num_launched += 1
        # NOTE: as the others read it: the runner's tables may change meanwhile.
        return LaunchedStep(self, self._num_launched, StepPlan.decode(plan).step(), sampling)

    def finish(self, number: int, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        """The last stage's part of the launched step of that number, from 1 on; what came of those
        before it, if nobody waited for them, is dropped. Raises WorkerLost."""
        rows = self._rows
        assert rows is not None, "prepare() comes first"
        while self._to_place and self._to_place[0][0] <= number:
            _, slot, packed = self._to_place.popleft()
            self._backend.set_adapter(slot, packed)
        while self._num_taken < number:
            self._wait(lambda: rows.arrived(LOOK_S))
            self._num_taken += 1
            if self._num_taken < number:
                rows.drop()
        rows.put_into(step)
        if self.laps is not None:
            self.laps.mark("stages")
        return self._backend.execute(step, sampling)

    def expert_layer_tokens(self) -> list[list[int]]:
        """Of all stages. While steps are under way the others' may be a moment old: to wait until
        they come to the question would leave this one without work."""
        self._num_counts += 1
        self._tell(Command.COUNT_EXPERTS, np.int32(self._num_counts).tobytes())
        counts = self._processes.stage_counts
        if self._num_taken == self._num_launched or not counts.are_complete:
            self._wait(lambda: counts.arrived(self._num_counts, LOOK_S))
        return counts.with_own(self._backend.expert_layer_tokens())

    def _place_own(self, slot: int, packed: _native.PackedAdapter | None) -> None:
        """Steps that were launched before are still to be finished with what the slot has."""
        self._to_place.append((self._num_launched + 1, slot, packed))

    def close(self) -> None:
        super().close()
        self._rows = None

    def _put(self, ring: _native.Ring, message: bytes) -> None:
        self._wait(lambda: ring.put(message, LOOK_S))

    def _wait(self, attempt: Callable[[], bool]) -> None:
        """Until the attempt, which waits for a moment itself, succeeds. Raises WorkerLost."""
        # Moments of waiting count, not the clock: time in which this process was stopped itself
        # proves nothing about others.
        heard, moments = self._processes.heard(), 0
        while not attempt():
            if self._processes.lost is not None:
                raise self._processes.lost
            moments += 1
            if moments * LOOK_S < self._processes.patience_s:
                continue
            now = self._processes.heard()
            for rank in range(1, self._processes.size):
                if now[rank] == heard[rank]:
                    raise self._hangs(rank)
            heard, moments = now, 0


Leader: TypeAlias = TensorLeader | GatheringLeader | PipelineLeader
