"""What the step loop needs from whatever computes: one process, several, or several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
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


@runtime_checkable
class ReleasesKV(Protocol):
    """What can do without the memory of its KV cache for a while; its content is lost."""

    def release_kv(self) -> None:
        """Nothing may be executed afterwards. A second call does nothing."""

    def restore_kv(self) -> None:
        """As after the start. Does nothing where the memory is there."""
