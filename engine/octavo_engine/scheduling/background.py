"""Sequences that are in no hurry, those of batches: they live on what the others leave.

They stand behind all others in line. Alone they run as anybody does, in shorter steps, for the next
moment somebody may come. While others run they have a share of the time: each step earns them a
part of its length, and out of that their own tokens are paid, so that steps are longer by that part
and no more. Where others wait for a row or for memory, they give theirs back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.scheduling.chunks import MIN_CHUNK

if TYPE_CHECKING:
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence

SHARE = 0.1  # of the time, while others run
ALONE = 0.25  # times max_step_ms is a step long in which nobody else takes part


class Background:
    """The account of the time that they may take of others."""

    def __init__(self, step_time: StepTimeModel, *, max_step_s: float) -> None:
        self._step_time = step_time
        self._most_s = SHARE * max_step_s  # more is not saved up: nobody shall wait for all of it
        self._credit_s = 0.0

    def earn(self, step_s: float) -> None:
        self._credit_s = min(self._credit_s + SHARE * step_s, self._most_s)

    @property
    def has_credit(self) -> bool:
        return self._credit_s > 0.0

    def pay_row(self) -> bool:
        """For one sequence that decodes; false if it must sit out. What a row costs is taken for a
        whole step until it is known."""
        step_time = self._step_time
        return self._pay(step_time.row_s() if step_time.knows_rows else step_time.decode_s(1))

    def pay_prompt(self, sequence: Sequence) -> int:
        """So many tokens of its prompt are paid for: a small chunk at the least, or none."""
        length = sequence.num_tokens - sequence.num_launched_tokens
        token_s = self._step_time.prefill_s(1)
        affordable = int(self._credit_s / token_s) if token_s > 0.0 else 0
        count = min(length, max(affordable, MIN_CHUNK))
        return count if self._pay(count * token_s) else 0

    def _pay(self, seconds: float) -> bool:
        if not self.has_credit:
            return False
        self._credit_s -= seconds
        return True


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
    is not in none himself."""
    owner = None if digest is None else scheduler.kv.computing.get(digest)
    return owner is not None and (sequence.is_background or not owner.is_background)


def _num_hurried(scheduler: Scheduler) -> int:
    count = 0
    for sequence in scheduler.waiting:
        if sequence.is_background:
            break
        count += 1
    return count
