"""What the scheduler needs of tiers that hold KV blocks beside the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo_engine.kv.manager import PrefixMatch
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence


class BlockTiers(Protocol):
    """Called for each sequence that could be admitted now; earlier too, when one comes whose
    blocks another engine has."""

    def defers(self, sequence: Sequence, match: PrefixMatch, step_time: StepTimeModel) -> bool:
        """Whether it had better wait for blocks that are on their way. It must not wait forever."""
