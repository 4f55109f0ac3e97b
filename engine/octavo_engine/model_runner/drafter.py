"""Has the draft model propose how sequences go on, once a step's tokens are known."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.backend import LaunchesDrafts, draft_limits
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.sampling.batch import SAMPLED_OK
from octavo_engine.sampling.rows import has_penalty

if TYPE_CHECKING:
    from octavo_engine.backends.backend import (
        BackendLimits,
        BackendStep,
        DraftsTokens,
        PendingSample,
    )
    from octavo_engine.model_runner.inputs import BuiltStep, Ints, StepInputs
    from octavo_engine.sampling.batch import SamplingBatch
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
        self._launches = backend if isinstance(backend, LaunchesDrafts) else None
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
        wanting = [span.row for span in spans if span.num_wanted]
        if self._launches is None or has_penalties(self._inputs, wanting):
            while spans:
                result.draft_passes += 1
                spans = self._draft(spans, proposed)
        else:
            result.draft_passes = self._draft_ahead(self._launches, spans, proposed)
        if self._launches is not None:
            result.draft_is_usual = self._launches.drafts_are_usual
        result.proposed = proposed
        result.draft_s = time.perf_counter() - started

    def _draft_ahead(
        self, backend: LaunchesDrafts, spans: list[_Span], proposed: dict[int, list[int]]
    ) -> int:
        """All passes, launched one behind the other before any token is known: the device finds
        each where the pass before left it. Returns how many there were."""
        under_way: list[tuple[list[_Span], PendingSample]] = []
        while spans:
            step, sampling, rows = self._step(spans)
            if under_way:
                step.awaited = rows
            drafting = [span for span in spans if span.num_wanted]
            under_way.append((drafting, backend.launch_draft(step, sampling)))
            spans = [_behind(span) for span in drafting if span.num_wanted > 1]
        ended: set[int] = set()  # entries whose draws failed: what follows is worth nothing
        for drafting, pending in under_way:
            sampled = pending.wait()
            drawn = zip(drafting, sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
            for span, token, status in drawn:
                if status != SAMPLED_OK:
                    ended.add(span.entry)
                if span.entry not in ended:
                    self._note(span, token, proposed)
        return len(under_way)

    def _step(self, spans: list[_Span]) -> tuple[BackendStep, SamplingBatch, Ints]:
        rows, firsts, counts, wanted = (
            np.array([getattr(span, name) for span in spans], np.int32)
            for name in ("row", "first", "num_tokens", "num_wanted")
        )
        return *self._inputs.draft_step(rows, firsts, counts, wanted > 0), rows

    def _note(self, span: _Span, token: int, proposed: dict[int, list[int]]) -> None:
        self._inputs.token_ids[span.row, span.first + span.num_tokens] = token
        proposed.setdefault(span.entry, []).append(token)

    def _draft(self, spans: list[_Span], proposed: dict[int, list[int]]) -> list[_Span]:
        """One pass of the draft model. Returns what is left to do: a token for each span that
        wants more."""
        step, sampling, _ = self._step(spans)
        sampled = self._backend.draft(step, sampling)
        drafting = [span for span in spans if span.num_wanted]
        drawn = zip(drafting, sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
        following = []
        for span, token, status in drawn:
            if status != SAMPLED_OK:
                continue
            self._note(span, token, proposed)
            if span.num_wanted > 1:
                following.append(_behind(span))
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


def _behind(span: _Span) -> _Span:
    """The token drafted behind it, which the next pass sees."""
    first = span.first + span.num_tokens
    return span._replace(first=first, num_tokens=1, num_wanted=span.num_wanted - 1)


def has_penalties(inputs: StepInputs, rows: list[int]) -> bool:
    """Then what is drawn in a pass depends on the tokens of those before."""
    return bool(has_penalty(inputs.table[rows]).any())


def num_useful(sequence: Sequence, end: int, token: int, most: int) -> int:
    """How many tokens to draft behind `token`, which takes place `end`: as far as the sequence can
    still go on."""
    if token in sequence.stop_ids:
        return 0
    return max(0, min(most, sequence.max_num_tokens - end - 2))
