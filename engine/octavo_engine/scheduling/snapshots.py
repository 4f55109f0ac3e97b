"""Where in a step recurrent states are saved, and which go back before it."""

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
        is_prompt = start < sequence.num_prompt_tokens
        if is_prompt or start % stride + count >= stride:
            batch.state_saves += [
                StateSave(index, end, slot) for end, slot in states.plan(sequence, start, count)
            ]


def plan_rewinds(batch: ScheduledBatch, states: StateSnapshots) -> None:
    """Have the states go back that stand behind draft tokens which were wrong."""
    # Hot path: once per scheduled sequence.
    for sequence in batch.sequences:
        if sequence.rewind:
            batch.state_loads.append((states.take_rewind(sequence), sequence.row))


def plan_draft_saves(batch: ScheduledBatch) -> None:
    """Add to the batch the saves that its drafts need, but for those that are snapshots, too."""
    for index in batch.drafts:
        saves = batch.sequences[index].draft_saves
        batch.state_saves += [StateSave(index, end, slot) for end, slot in saves.items()]
