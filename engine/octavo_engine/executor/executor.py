"""What the step loop needs from whatever computes: one process, several, or several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import CompileListener
    from octavo_engine.errors import WorkerLost
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult


class Executor(Protocol):
    """Holds the model and its KV memory, and computes one batch at a time."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute a batch that is not empty. What it raises has spoilt the whole step."""

    def poison_blocks(self, block_ids: list[int]) -> None:
        """Fill freed blocks with NaN: tests show by it that freed memory is never read."""

    def close(self) -> None:
        """Let go of memory and threads. A second call does nothing."""


UnderWay: TypeAlias = Any  # the executor's own: what it must remember of a launched batch


class LaunchesBatches(Protocol):
    """An executor whose batches compute while the next ones are planned."""

    def launch(self, batch: ScheduledBatch) -> UnderWay:
        """Begin with a batch that is not empty. One before it may still be under way, and tokens
        that it samples are this one's input where `batch.awaited` says so."""

    def land(self, under_way: UnderWay) -> StepResult:
        """Wait for what was launched; once for each, in the order of launches."""


@runtime_checkable
class WarmsUp(Protocol):
    """What compiles kernels when they are first launched."""

    def warm_up(self, listener: CompileListener) -> None:
        """Compile all that steps will need. What is compiled later all the same, `listener`
        hears of."""


@runtime_checkable
class TimesPictures(Protocol):
    """What encodes pictures, if its model sees."""

    def time_picture(self) -> float:
        """About how many seconds a row of one takes."""


@runtime_checkable
class WatchesWorkers(Protocol):
    """What computes with other processes, which may end when nothing is computed, too."""

    def watch_workers(self, when_lost: Callable[[WorkerLost], None]) -> None:
        """Have it called, on any thread, when one has ended; at once if one has."""


@runtime_checkable
class LosesDevice(Protocol):
    """What computes on a device that one fault can leave useless until the process ends."""

    def device_is_lost(self) -> bool:
        """Ask the device, once a step has failed."""


@runtime_checkable
class CountsExpertTokens(Protocol):
    """What may consist of ranks that have experts of their own."""

    def expert_rank_tokens(self) -> list[int]:
        """How many rows the experts of each rank have computed so far; empty where each rank has a
        part of all experts."""

    def expert_layer_tokens(self) -> list[list[int]]:
        """For how many rows each expert of each mixture was chosen so far; empty without any."""


@runtime_checkable
class ReleasesKV(Protocol):
    """What can do without the memory of its KV cache for a while; its content is lost."""

    def release_kv(self) -> None:
        """Nothing may be executed afterwards. A second call does nothing."""

    def restore_kv(self) -> None:
        """As after the start. Does nothing where the memory is there."""


@runtime_checkable
class ReleasesWeights(Protocol):
    """What can do without its weights in the device's memory for a while."""

    def release_weights(self, *, keep: bool) -> None:
        """Nothing may be executed afterwards. With `keep` they stay in the host's memory, else they
        are read from the model's files again. A second call does nothing."""

    def restore_weights(self) -> None:
        """Before restore_kv. Does nothing where they are there."""
