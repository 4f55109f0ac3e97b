"""What one step computes: the scheduler's decision, as values that could cross a process
boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo_engine.state.adapter import AdapterPlacement
    from octavo_engine.state.media import MediaItem
    from octavo_engine.state.sequence import Sequence


class BlockGrowth(NamedTuple):
    """Block `block_id` took place `place` of the block table in row `row`, in a group of layers."""

    row: int
    place: int
    block_id: int
    group: int = 0


class BlockCopy(NamedTuple):
    """Copy-on-write: the first `num_tokens` slots of `source` are copied to `target` before the
    step."""

    source: int
    target: int
    num_tokens: int


class EncodeParts(NamedTuple):
    """The parts [first, end) of a picture's encoding, of so many."""

    first: int = 0
    end: int = 1
    total: int = 1

    @property
    def share(self) -> float:
        return (self.end - self.first) / self.total

    @property
    def is_last(self) -> bool:
        return self.end == self.total


WHOLE = EncodeParts()


class StateSave(NamedTuple):
    """Behind the first `num_tokens` tokens of an entry, its recurrent state goes to `slot`."""

    entry: int
    num_tokens: int
    slot: int


@dataclass(slots=True)
class ScheduledBatch:
    """Parallel lists, one entry a scheduled sequence, and what changed since the last step.

    A *row* is the place a running sequence keeps in the runner's arrays from admission to its
    end. Entry i computes tokens [starts[i], starts[i] + counts[i]) of its sequence.
    `num_logits[i]` says of how many of its last tokens the logits are wanted: 0 within a prompt,
    1 when it is caught up after this step and so samples a token, more when prompt
    log-probabilities were requested. `samples[i]` is true if the last of them yields the next
    token.

    With *drafts* an entry computes tokens that its sequence does not have: `counts[i]` and
    `num_logits[i]` include them. A token is sampled at each of their positions as it would be
    without them, and counts as far as the drafts before it are what was sampled there.
    """

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    admitted: list[Sequence] = field(
        default_factory=list
    )  # rows to write afresh, block table included
    grown: list[BlockGrowth] = field(default_factory=list)  # blocks added to rows admitted earlier
    copies: list[BlockCopy] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by entry, of those that have any
    # Entries of one token that the step before, still under way, is sampling: only the device will
    # have it in time.
    awaited: list[int] = field(default_factory=list)
    num_proposed: int = 0  # tokens to propose behind each that is sampled, at most: as long as
    least_chance: float = 0.0  # the chance that all of them are right is above this,
    trust: tuple[float, ...] = ()  # by how often those of each level of sureness are; empty: all
    state_loads: list[tuple[int, int]] = field(default_factory=list)  # source slot, row
    state_saves: list[StateSave] = field(default_factory=list)
    # The picture that is encoded before the step is computed; there may be nothing else to compute.
    encode: MediaItem | None = None
    encode_rows: int = 0  # that it becomes
    encode_parts: EncodeParts = WHOLE
    reads_encoded: bool = False  # the step reads its rows: it cannot be computed without them
    media_dropped: list[bytes] = field(default_factory=list)  # pictures whose rows are given up
    placed: list[AdapterPlacement] = field(default_factory=list)  # before the step is computed

    @property
    def is_empty(self) -> bool:
        return not self.sequences and self.encode is None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_decodes(self) -> int:
        """Tokens of entries that were one token behind, drafts included."""
        return self.counts.count(1) + sum(self.counts[index] for index in self.drafts)
