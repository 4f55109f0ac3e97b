"""One step ahead: when a batch may be planned while the one before it is still under way.

The scheduler's books say what is known: `num_computed_tokens` and `token_ids` change when a batch
is reported. Beside them `num_ahead` counts what a batch under way computes, and the next is planned
as if that were done. Three things cannot be: a token that the host must know before the next can be
chosen (a grammar's, `SamplingParams.needs_host`), a guess behind a token that nobody knows, and
taking a sequence's memory away, to preempt or to suspend it.
A device works in the order of its launches, so blocks may change hands meanwhile: whoever gets them
writes after all who still read or write there.

An end is found one batch late. What was computed beyond it is dropped when its batch is reported,
as it is for a sequence that was aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.scheduling.background import must_make_way

if TYPE_CHECKING:
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.batch import ScheduledBatch


def can_plan_ahead(scheduler: Scheduler) -> bool:
    """Whether schedule() may be called before the batch under way is reported. What is past its
    deadline has been ended: a deadline in between could make room for who takes memory away."""
    if scheduler.is_suspending or must_make_way(scheduler):
        return False
    if scheduler.shares.to_displace(scheduler) is not None:
        return False
    num_growing = 0
    # Hot path: once per running sequence.
    for sequence in scheduler.running:
        if sequence.needs_host:
            return False
        start = sequence.num_computed_tokens + sequence.num_ahead
        num_growing += start == len(sequence.block_table) * BLOCK_SIZE
    return num_growing <= scheduler.kv.pool.num_free


def launch(batch: ScheduledBatch) -> None:
    """The batch is under way."""
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        sequence.num_ahead += count


def land(batch: ScheduledBatch) -> None:
    """The batch is computed, and is reported next."""
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        sequence.num_ahead -= count
