"""Sequences that are in no hurry, those of batches: they live on what the others leave.

They stand behind all others in line. Alone they run as anybody does, in shorter steps, for the next
moment somebody may come. While others run they have a share of the time: each step earns them a
part of its length, and out of that their own tokens are paid, so that steps are longer by that part
and no more. Where others wait for a row or for memory, they give theirs back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.scheduling.time_account import TimeAccount

if TYPE_CHECKING:
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence

SHARE = 0.1  # of the time, while others run
ALONE = 0.25  # times max_step_ms is a step long in which nobody else takes part


class Background(TimeAccount):
    """The account of the time that they may take of others."""

    def __init__(self, step_time: StepTimeModel, *, max_step_s: float) -> None:
        super().__init__(step_time, share=SHARE)
        self._most_s = SHARE * max_step_s  # more is not saved up: nobody shall wait for all of it

    def earn_step(self, step_s: float) -> None:
        self.earn(step_s, most_s=self._most_s)


def others_run(scheduler: Scheduler) -> bool:
    """Somebody runs who is in a hurry: such are in front."""
    return bool(scheduler.running) and not scheduler.running[0].is_background


def is_alone(scheduler: Scheduler) -> bool:
    """Of those that run, and of those that wait where nobody does, none is in a hurry."""
    first = next(iter(scheduler.running or scheduler.waiting), None)
    return first is not None and first.is_background


def must_make_way(scheduler: Scheduler) -> bool:
    """Whether somebody waits for what the last one in line holds, who is in no hurry."""
    if not scheduler.running or not scheduler.running[-1].is_background:
        return False
    first = next(iter(scheduler.waiting), None)
    if first is None or first.is_background:
        return False
    return first.blocked_at is not None or len(scheduler.free_rows) < _num_hurried(scheduler)


def waits_for_prefix(scheduler: Scheduler, sequence: Sequence, digest: bytes | None) -> bool:
    """Whether it had better wait for who computes that block. Nobody waits for one in no hurry who
    is not in none himself, nor for one of another request that lives on its share."""
    owner = None if digest is None else scheduler.kv.computing.get(digest)
    if owner is None:
        return False
    if owner.group != sequence.group and scheduler.shares.pays_for_prompt(owner):
        return False
    return sequence.is_background or not owner.is_background


def _num_hurried(scheduler: Scheduler) -> int:
    count = 0
    for sequence in scheduler.waiting:
        if sequence.is_background:
            break
        count += 1
    return count
