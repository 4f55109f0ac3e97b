"""Has a head with layers of its own propose how sequences go on, from the model's hidden states."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.backend import LaunchesStateDrafts, draft_limits
from octavo_engine.config import BLOCK_SIZE, MAX_SPECULATION
from octavo_engine.model_runner.drafter import has_penalties, num_useful
from octavo_engine.sampling.batch import SAMPLED_OK
from octavo_engine.state.guesser import level_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from octavo_engine.backends.backend import (
        BackendLimits,
        BackendStep,
        DraftsFromStates,
        PendingSample,
        States,
    )
    from octavo_engine.model_runner.inputs import BuiltStep, Ints, StepInputs
    from octavo_engine.sampling.batch import Sampled, SamplingBatch
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult


class _Span(NamedTuple):
    """Positions of an entry that the head is to see: [first, first + the states there are)."""

    entry: int
    row: int
    first: int
    states: tuple[States, ...]  # one behind the other
    num_wanted: int  # tokens to draft behind them
    can_wait: bool = False
    chance: float = 1.0  # that what was drafted is right

    @property
    def num_states(self) -> int:
        return sum(map(len, self.states))

    @property
    def end(self) -> int:
        return self.first + self.num_states


class StateDrafter:
    """The head's progress in each row.

    At a position it sees the model's state there and the token behind, so it can follow a step as
    soon as its tokens are known. It sees every position, whether something is drafted or not: the
    states are there only now. While a sequence decodes and nothing is drafted, states wait until
    its block is full or it ends; then a prefix found in the cache has the head's keys and values,
    too. Of a sequence that is preempted or aborted, those of up to 15 positions never come: what is
    drafted behind them is less often right, and no output differs.
    """

    def __init__(
        self, backend: DraftsFromStates, inputs: StepInputs, limits: BackendLimits
    ) -> None:
        self._backend = backend
        self._launches = backend if isinstance(backend, LaunchesStateDrafts) else None
        self._inputs = inputs
        self._max_tokens = draft_limits(limits).max_tokens
        self._waiting: dict[int, _Span] = {}  # by row

    def run(self, batch: ScheduledBatch, built: BuiltStep, result: StepResult) -> None:
        """Fill `result.proposed` and `result.draft_s`."""
        started = time.perf_counter()
        for sequence in batch.admitted:
            self._waiting.pop(sequence.row, None)
        spans = self._due(self._new_spans(batch, built, result))
        if spans:
            result.draft_passes, result.draft_tokens = 0, sum(span.num_states for span in spans)
            rows = [span.row for span in spans if span.num_wanted]
            if self._launches is None or has_penalties(self._inputs, rows):
                self._propose(spans, batch, result)
            else:
                self._propose_ahead(self._launches, spans, result)
            if self._launches is not None:
                result.draft_is_usual = self._launches.drafts_are_usual
        result.draft_s = time.perf_counter() - started

    def _propose(self, spans: list[_Span], batch: ScheduledBatch, result: StepResult) -> None:
        following: list[_Span] = []
        for some in _passes(spans, self._max_tokens, self._joined):
            result.draft_passes += 1
            following += self._draft(some, batch, result, is_first=True)
        while following:
            result.draft_passes += 1
            following = self._draft(following, batch, result, is_first=False)

    def _propose_ahead(
        self, backend: LaunchesStateDrafts, spans: list[_Span], result: StepResult
    ) -> None:
        """All passes, launched one behind the other before any token is known: the device finds
        each, and each state, where the pass before left it."""
        under_way: list[tuple[list[_Span], PendingSample]] = []

        def launched(some: list[_Span], *, is_first: bool) -> list[_Span]:
            step, sampling, rows = self._step(some)
            if not is_first:
                step.awaited = rows
            pending, own = backend.launch_draft_from(
                step,
                self._joined([states for span in some for states in span.states]),
                sampling,
                is_first=is_first,
            )
            drafting = [span for span in some if span.num_wanted]
            under_way.append((drafting, pending))
            return [
                _behind(span, own[index : index + 1])
                for index, span in enumerate(drafting)
                if span.num_wanted > 1
            ]

        following: list[_Span] = []
        for some in _passes(spans, self._max_tokens, self._joined):
            following += launched(some, is_first=True)
        while following:
            following = launched(following, is_first=False)
        ended: set[int] = set()  # entries whose draws failed: what follows is worth nothing
        for drafting, pending in under_way:
            for span, token, is_ok in _drawn(drafting, pending.wait()):
                if not is_ok:
                    ended.add(span.entry)
                if span.entry not in ended:
                    self._note(span, token, result.proposed)
        result.draft_passes += len(under_way)

    def _draft(
        self, spans: list[_Span], batch: ScheduledBatch, result: StepResult, *, is_first: bool
    ) -> list[_Span]:
        """One pass of the head. Returns what is left to do: a position for each span that wants
        more and is sure enough so far."""
        step, sampling, _ = self._step(spans)
        sampling.num_logprobs = 0
        states = self._joined([states for span in spans for states in span.states])
        sampled, own = self._backend.draft_from(step, states, sampling, is_first=is_first)
        following = []
        drafting = [span for span in spans if span.num_wanted]
        for index, (span, token, is_ok) in enumerate(_drawn(drafting, sampled)):
            if not is_ok:
                continue
            self._note(span, token, result.proposed)
            chance = span.chance
            if sampled.logprobs is not None:
                level = level_of(math.exp(sampled.logprobs[index]))
                result.sureness.setdefault(span.entry, []).append(level)
                chance *= batch.trust[level] if batch.trust else 1.0
            if span.num_wanted > 1 and chance > batch.least_chance:
                behind = _behind(span, own[index : index + 1])
                following.append(behind._replace(chance=chance))
        return following

    def _step(self, spans: list[_Span]) -> tuple[BackendStep, SamplingBatch, Ints]:
        rows = np.array([span.row for span in spans], np.int32)
        firsts = np.array([span.first for span in spans], np.int32)
        counts = np.array([span.num_states for span in spans], np.int32)
        wants = np.array([span.num_wanted > 0 for span in spans])
        return *self._inputs.draft_step(rows, firsts, counts, wants, ahead=1), rows

    def _note(self, span: _Span, token: int, proposed: dict[int, list[int]]) -> None:
        self._inputs.token_ids[span.row, span.end + 1] = token
        proposed.setdefault(span.entry, []).append(token)

    def _joined(self, states: list[States]) -> States:
        if self._launches is not None:
            return self._launches.join_states(states)
        return np.concatenate(states)

    def _new_spans(
        self, batch: ScheduledBatch, built: BuiltStep, result: StepResult
    ) -> list[_Span]:
        """The positions that the step computed, as far as the tokens behind them are known."""
        found = []
        skipped = {*result.failed, *result.deferred}
        for entry, sequence in enumerate(batch.sequences):
            drafts = batch.drafts.get(entry, ())
            start, count = batch.starts[entry], batch.counts[entry]
            end = start + count - len(drafts) + len(result.accepted.get(entry, ()))
            is_sampled = batch.samples[entry] and entry not in skipped
            known = end + 1 if is_sampled else min(end + 1, len(sequence.token_ids))
            if known - 1 <= start:
                continue
            num_useful_now = num_wanted = 0
            if is_sampled:
                num_useful_now = num_useful(sequence, end, result.tokens[entry], MAX_SPECULATION)
            if batch.num_proposed and entry not in result.forced:
                num_slots = min(map(len, sequence.block_tables)) * BLOCK_SIZE
                num_wanted = max(0, min(num_useful_now, batch.num_proposed, num_slots - end))
            can_wait = count - len(drafts) == 1 and num_useful_now > 0 and num_wanted == 0
            found.append((entry, start, known - 1, num_wanted, can_wait))
        if not found:
            return []
        first_tokens = built.step.seq_starts.tolist()
        tokens = [
            np.arange(end - start, dtype=np.int32) + first_tokens[entry]
            for entry, start, end, *_ in found
        ]
        states = self._backend.token_states(np.concatenate(tokens))
        spans, place = [], 0
        for entry, start, end, num_wanted, can_wait in found:
            own = states[place : place + end - start]
            spans.append(_Span(entry, batch.rows[entry], start, (own,), num_wanted, can_wait))
            place += end - start
        return spans

    def _due(self, spans: Iterable[_Span]) -> list[_Span]:
        """Those that the head sees now, with what waited for it; the others wait."""
        due = []
        for span in spans:
            waiting = self._waiting.pop(span.row, None)
            if waiting is not None and waiting.end == span.first:
                states = (*waiting.states, *span.states)
                span = span._replace(first=waiting.first, states=states)
            fills_block = span.end // BLOCK_SIZE > span.first // BLOCK_SIZE
            if span.can_wait and not fills_block:
                self._waiting[span.row] = span
            else:
                due.append(span)
        return due


def _behind(span: _Span, state: States) -> _Span:
    """The position behind it, of which the head left its own state."""
    return _Span(span.entry, span.row, span.end, (state,), span.num_wanted - 1)


def _drawn(drafting: list[_Span], sampled: Sampled) -> Iterator[tuple[_Span, int, bool]]:
    """What was drawn for each, and whether it may be one."""
    is_ok = (sampled.status == SAMPLED_OK).tolist()
    return zip(drafting, sampled.tokens.tolist(), is_ok, strict=True)


def _passes(
    spans: Iterable[_Span], max_tokens: int, join: Callable[[list[States]], States]
) -> Iterator[list[_Span]]:
    """Of at most so many positions each. What is behind in a span comes in a later pass."""
    some: list[_Span] = []
    room = max_tokens
    for whole in spans:
        span = whole
        while span.num_states > room:
            states = join(list(span.states))
            if room:
                some.append(span._replace(states=(states[:room],), num_wanted=0))
                span = span._replace(first=span.first + room, states=(states[room:],))
            yield some
            some, room = [], max_tokens
        some.append(span)
        room -= span.num_states
    if some:
        yield some
