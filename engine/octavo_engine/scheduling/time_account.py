"""An account of engine time: what some sequences may take of the steps that others take part in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.scheduling.chunks import MIN_CHUNK

if TYPE_CHECKING:
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence


class TimeAccount:
    """Each step earns a share of its length; rows and prompt tokens are paid out of that.

    What is paid may exceed the credit once: the debt is carried to the next steps.
    """

    def __init__(self, step_time: StepTimeModel, *, share: float) -> None:
        self._step_time = step_time
        self._share = share
        self._credit_s = 0.0

    def earn(self, step_s: float, *, most_s: float) -> None:
        """A step took so long. No more than `most_s` is saved up."""
        self._credit_s = min(self._credit_s + self._share * step_s, most_s)

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

    def owe(self, num_tokens: int) -> None:
        """So many tokens were computed beside those that were paid for."""
        self._credit_s -= num_tokens * self._step_time.prefill_s(1)

    def _pay(self, seconds: float) -> bool:
        if not self.has_credit:
            return False
        self._credit_s -= seconds
        return True
