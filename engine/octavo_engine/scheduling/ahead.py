"""Steps ahead: when a batch may be planned while those before it are still under way.

Committed and in-flight tokens are counted separately: `num_computed_tokens` and `token_ids` change
only when a batch is reported, `num_ahead` counts what a batch under way computes, and the next is
planned as if that were done. Three things cannot be planned ahead (`Scheduler.can_plan_ahead`): a
token that the host must know before the next can be chosen (a grammar's,
`SamplingParams.needs_host`), a guess behind a token that is not known yet, and taking a sequence's
memory away, to preempt or to suspend it.
A device works in the order of its launches, so blocks may change owners meanwhile: the new owner
writes after all that still read or write there.

On a pipeline of stages (`num_stages`) a batch is computed in parts, each by another process, and
what it samples is known only when it is reported. So no sequence is in two batches under way, but
for chunks of a prompt: all tokens of a batch are known, grammars and guesses need no care, and the
sequences that decode are dealt out evenly over as many batches as there are stages.

An end is found one batch late. What was computed beyond it is dropped when its batch is reported,
as it is for a sequence that was aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.state.batch import ScheduledBatch


def launch(batch: ScheduledBatch) -> None:
    """The batch is under way."""
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        sequence.num_ahead += count


def land(batch: ScheduledBatch) -> None:
    """The batch is computed, and is reported next."""
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        sequence.num_ahead -= count
