"""Has the draft model propose how sequences go on, once a step's tokens are known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.backend import draft_limits
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.batch import SAMPLED_OK

if TYPE_CHECKING:
    from octavo_engine.backends.backend import BackendLimits, DraftsTokens
    from octavo_engine.model_runner.inputs import BuiltStep, StepInputs
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult
    from octavo_engine.state.sequence import Sequence


class _Span(NamedTuple):
    """Tokens [first, first + num_tokens) of an entry, which the draft model is to see."""

    entry: int
    row: int
    first: int
    num_tokens: int
    num_wanted: int  # tokens to draft behind them


class Drafter:
    """The draft model's progress in each row.

    It sees every chunk of a prompt, so that a prefix found in the cache has its state too. While a
    sequence decodes it sees tokens only when some are to be drafted, and then all it has missed.
    Draft tokens are drawn with the numbers of their positions, as the model's own will be: what is
    alike in both distributions comes true under sampling, too.
    """

    def __init__(
        self, backend: DraftsTokens, inputs: StepInputs, limits: BackendLimits, *, has_windows: bool
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._max_tokens = draft_limits(limits).max_tokens
        self._has_windows = has_windows
        self._num_seen = np.zeros(len(inputs.token_ids), np.int32)  # tokens, of each row

    def run(self, batch: ScheduledBatch, built: BuiltStep, result: StepResult) -> None:
        """Fill `result.proposed` and `result.draft_s`."""
        started = time.perf_counter()
        for sequence in batch.admitted:
            self._num_seen[sequence.row] = sequence.num_computed_tokens
        spans = self._spans(batch, result)
        if not spans:
            return
        proposed: dict[int, list[int]] = {}
        result.draft_passes, result.draft_tokens = 0, sum(span.num_tokens for span in spans)
        while spans:
            result.draft_passes += 1
            spans = self._draft(spans, proposed)
        result.proposed = proposed
        result.draft_s = time.perf_counter() - started

    def _draft(self, spans: list[_Span], proposed: dict[int, list[int]]) -> list[_Span]:
        """One pass of the draft model. Returns what is left to do: a token for each span that
        wants more."""
        rows, firsts, counts, wanted = (
            np.array([getattr(span, name) for span in spans], np.int32)
            for name in ("row", "first", "num_tokens", "num_wanted")
        )
        step, sampling = self._inputs.draft_step(rows, firsts, counts, wanted > 0)
        sampled = self._backend.draft(step, sampling)
        drawn = zip(sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
        following = []
        for span in spans:
            if not span.num_wanted:
                continue
            token, status = next(drawn)
            if status != SAMPLED_OK:
                continue
            position = span.first + span.num_tokens
            self._inputs.token_ids[span.row, position] = token
            proposed.setdefault(span.entry, []).append(token)
            if span.num_wanted > 1:
                following.append(_Span(span.entry, span.row, position, 1, span.num_wanted - 1))
        return following

    def _spans(self, batch: ScheduledBatch, result: StepResult) -> list[_Span]:
        """What the draft model must see of each entry now."""
        spans = []
        room = self._max_tokens
        skipped = {*result.failed, *result.deferred}
        for entry, sequence in enumerate(batch.sequences):
            if entry in skipped:
                continue
            drafts = batch.drafts.get(entry, ())
            start, count = batch.starts[entry], batch.counts[entry]
            end = start + count - len(drafts) + len(result.accepted.get(entry, ()))
            num_wanted = 0
            if batch.num_proposed and batch.samples[entry] and entry not in result.forced:
                num_slots = min(map(len, sequence.block_tables)) * BLOCK_SIZE
                most = max(0, min(batch.num_proposed, num_slots - end))
                num_wanted = num_useful(sequence, end, result.tokens[entry], most)
            if not num_wanted and count - len(drafts) == 1:
                continue  # it decodes
            row = batch.rows[entry]
            first = int(self._num_seen[row])
            if self._has_windows:
                first = max(first, start)  # blocks before may be another sequence's by now
            known = end + (num_wanted > 0)
            count = min(known - first, room)
            if count <= 0:
                continue
            if first + count < known:
                num_wanted = 0  # it catches up with the next steps
            self._num_seen[row] = first + count
            spans.append(_Span(entry, row, first, count, num_wanted))
            room -= count
        return spans


def num_useful(sequence: Sequence, end: int, token: int, most: int) -> int:
    """How many tokens to draft behind `token`, which takes place `end`: as far as the sequence can
    still go on."""
    if token in sequence.stop_ids:
        return 0
    return max(0, min(most, sequence.max_num_tokens - end - 2))
