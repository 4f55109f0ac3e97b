"""Background sequences, those of batches: they use what the others leave.

They stand behind all others in line. Alone they run as any sequence does, in shorter steps, because
another one may arrive at any moment. While others run they have a share of the time: each step
earns them a part of its length, and out of that their own tokens are paid, so that steps are longer
by that part and no more. Where others wait for a row or for memory, they give theirs back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.scheduling.time_account import TimeAccount

if TYPE_CHECKING:
    from octavo_engine.scheduling.step_time import StepTimeModel

SHARE = 0.1  # of the time, while others run
ALONE = 0.25  # times max_step_ms is a step long in which only background sequences take part


class BackgroundAccount(TimeAccount):
    """The time that background sequences may take of the others."""

    def __init__(self, step_time: StepTimeModel, *, max_step_s: float) -> None:
        super().__init__(step_time, share=SHARE)
        self._most_s = SHARE * max_step_s  # more is not saved up: one burst may delay the others

    def earn_step(self, step_s: float) -> None:
        self.earn(step_s, most_s=self._most_s)
