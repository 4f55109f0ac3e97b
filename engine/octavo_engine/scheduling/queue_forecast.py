"""What a sequence would wait in the engine's queue: `protocol.admission` with a scheduler's facts.

The unit of work is a second of the engine's time, by the step-time model: what the model gets wrong
is in the measured rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octavo_engine.errors import QueueFull
from octavo_engine.protocol.admission import Forecast, retry_after_s

if TYPE_CHECKING:
    from octavo_engine.config import SchedulerConfig
    from octavo_engine.scheduling.policy import WaitingQueue
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence


class QueueForecast:
    """Of one scheduler. Work in the background is neither measured nor refused."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._config = config
        self._step_time = step_time
        self._forecast = Forecast()
        self._num_running = 0
        self._num_rows = 1  # that run or wait

    # -- what it learns from

    def after_schedule(self, waiting: WaitingQueue, num_running: int, now: float) -> None:
        """A step was planned. Hot path: once per step."""
        self._num_running = num_running
        self._num_rows = num_running + waiting.num_foreground
        self._forecast.rate.waits(now, is_waiting=waiting.num_foreground > 0)

    def started(self, sequence: Sequence, now: float) -> None:
        """It went from the queue to a row."""
        if not sequence.is_background:
            work_s = self._work_s(sequence.num_tokens, _num_allowed(sequence), self._num_rows)
            self._forecast.rate.took(work_s, now)

    def ended(self, sequence: Sequence, now: float) -> None:
        """By itself, and whole."""
        request = sequence.request
        if request.output_token_ids or sequence.is_background:
            return
        allowed = sequence.max_num_tokens - sequence.num_prompt_tokens
        began_at = sequence.added_at + sequence.queued_s
        if not (sequence.num_preemptions or sequence.num_suspensions):
            self._forecast.service.observe(
                now - began_at, tokens=sequence.num_output_tokens, max_tokens=allowed
            )
        self._forecast.patience.note(now - sequence.added_at, now, has_left=False)

    def left(self, sequence: Sequence, now: float) -> None:
        """Its client went away before the end."""
        if not (sequence.request.output_token_ids or sequence.is_background):
            self._forecast.patience.note(now - sequence.added_at, now, has_left=True)

    # -- what it says

    def check(
        self, sequence: Sequence, waiting: WaitingQueue, ahead: list[Sequence] | None, now: float
    ) -> None:
        """Raises QueueFull: it would come too late. `ahead`: the sequences served first; None:
        all."""
        request = sequence.request
        if not waiting.num_foreground or request.output_token_ids or sequence.is_background:
            return
        time_left_s = math.inf if request.deadline_at is None else request.deadline_at - now
        shortfall_s = self._forecast.shortfall_s(
            now,
            work_ahead=self._work_ahead_s(waiting, ahead),
            max_wait_s=self._config.queue_timeout_s,
            time_left_s=time_left_s,
            max_tokens=_num_allowed(sequence),
            is_whole=request.is_whole,
        )
        if shortfall_s > 0.0:
            raise QueueFull(
                f"{waiting.num_foreground} requests are waiting, and this one would come "
                f"{shortfall_s:.1f} s too late for its deadline or for --queue-timeout; send it "
                "again later",
                retry_after_s=math.ceil(retry_after_s(shortfall_s)),
            )

    def is_late(self, sequence: Sequence, now: float) -> bool:
        """Its answer could not be whole by its deadline, now that its turn has come."""
        deadline_at = sequence.request.deadline_at
        if deadline_at is None or sequence.num_output_tokens:
            return False
        allowed = _num_allowed(sequence)
        return self._forecast.is_late(now, deadline=deadline_at, max_tokens=allowed)

    def in_turn(self, line: list[Sequence], now: float) -> list[Sequence]:
        """The order to admit them in: those whose clients have waited for longer than clients do
        come last."""
        if len(line) < 2 or math.isinf(self._forecast.longest_wait_s(now)):
            return line
        overdue = {s for s in line if self._is_overdue(s, now)}
        return [s for s in line if s not in overdue] + [s for s in line if s in overdue]

    def wait_s(self, waiting: WaitingQueue, ahead: list[Sequence] | None, now: float) -> float:
        """What one would wait that came now; `ahead` as for `check`."""
        if not waiting.num_foreground:
            return 0.0
        return self._forecast.rate.wait_s(self._work_ahead_s(waiting, ahead), now)

    def longest_wait_s(self, now: float) -> float:
        """A request that would wait longer is refused."""
        if math.isinf(self._config.queue_timeout_s):
            return math.inf
        return min(self._config.queue_timeout_s, self._forecast.longest_wait_s(now))

    # -- inside

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        if sequence.num_output_tokens or sequence.is_background:
            return False
        return self._forecast.is_overdue(now, since=sequence.added_at)

    def _work_ahead_s(self, waiting: WaitingQueue, ahead: list[Sequence] | None) -> float:
        num_rows = self._num_running + waiting.num_foreground
        if ahead is None:
            num_tokens, num_allowed = waiting.num_foreground_tokens, waiting.num_foreground_allowed
        else:
            num_tokens = sum(sequence.num_tokens for sequence in ahead)
            num_allowed = sum(map(_num_allowed, ahead))
        return self._work_s(num_tokens, num_allowed, num_rows)

    def _work_s(self, num_tokens: int, num_allowed: int, num_rows: int) -> float:
        """Of prompts of so many tokens, and answers of at most so many.

        `num_rows`: sequences that run or wait, since those that wait will be rows of the same
        steps. Counted as if the few that run now were all, a burst on an idle engine looked as
        long as its answers one after the other.
        """
        num_rows = min(max(num_rows, 1), self._config.max_num_seqs)
        token_s = self._step_time.decode_s(num_rows) / num_rows
        usual = self._forecast.service.usual_tokens(num_allowed)
        return self._step_time.prefill_s(num_tokens) + usual * token_s


def _num_allowed(sequence: Sequence) -> int:
    """Tokens that it may still add."""
    return sequence.max_num_tokens - sequence.num_tokens
