"""Where in a step snapshots of recurrent states are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.state.batch import StateSave

if TYPE_CHECKING:
    from octavo_engine.kv.states import StateSnapshots
    from octavo_engine.state.batch import ScheduledBatch


def plan_saves(batch: ScheduledBatch, states: StateSnapshots) -> None:
    """Add to the batch a save for each snapshot that its tokens reach."""
    stride = states.stride
    entries = zip(batch.sequences, batch.starts, batch.counts, strict=True)
    # Hot path: once per scheduled sequence.
    for index, (sequence, start, count) in enumerate(entries):
        if start % stride + count >= stride:
            batch.state_saves += [
                StateSave(index, end, slot) for end, slot in states.plan(sequence, start, count)
            ]
