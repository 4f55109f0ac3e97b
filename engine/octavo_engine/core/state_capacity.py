"""How much memory recurrent states get, and how many sequences may run: arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.caches import STATE_STRIDE
from octavo_engine.core.capacity import gib
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.config import SchedulerConfig

# Of the cache's memory: what states of running sequences may take at most, and of the rest what
# snapshots may.
LIVE_FRACTION = 0.5
SNAPSHOT_FRACTION = 0.25
# Of a model whose layers all have states: its blocks take no memory but their names.
MAX_EMPTY_BLOCKS = 1 << 17


class StateCapacity(NamedTuple):
    """The settled sizes, and the sum in words; `memory` is what they leave."""

    max_num_seqs: int
    num_snapshots: int
    memory: int
    note: str = ""

    @property
    def num_slots(self) -> int:
        return self.max_num_seqs + self.num_snapshots


def settle_states(
    settings: SchedulerConfig, memory: int, *, state_bytes: int, length: int, has_pages: bool,
    num_drafts: int = 0,
) -> StateCapacity:  # fmt: skip
    """Of `memory` bytes for caches, where a sequence's states take `state_bytes`. `num_drafts`: the
    most draft tokens of a step, each of which needs a state to go back to. Raises ConfigError."""
    if state_bytes == 0:
        return StateCapacity(settings.max_num_seqs, 0, memory)
    share = LIVE_FRACTION if has_pages else 1.0
    num_seqs = min(settings.max_num_seqs, int(memory * share) // state_bytes)
    if num_seqs == 0:
        raise ConfigError(
            f"the recurrent states of one sequence take {gib(state_bytes)}, but the cache has "
            f"{gib(memory)}; free memory, or raise --kv-cache-memory-bytes or --memory-fraction"
        )
    memory -= num_seqs * state_bytes
    share, most = SNAPSHOT_FRACTION if has_pages else 1.0, num_drafts
    if settings.enable_prefix_caching:
        most += settings.max_num_seqs * (length // STATE_STRIDE + 1)  # one at the prompt's end
    num_snapshots = min(int(memory * share) // state_bytes, most)
    note = (
        f"{num_seqs} recurrent states of {gib(state_bytes)} and {num_snapshots} snapshots of them"
    )
    if num_seqs < settings.max_num_seqs:
        note += f" (no more than {num_seqs} sequences run at a time: --max-num-seqs is cut)"
    return StateCapacity(num_seqs, num_snapshots, memory - num_snapshots * state_bytes, note)
