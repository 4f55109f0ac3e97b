"""Has heads propose how sequences go on, from the hidden states of the step that sampled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.backends.backend import LaunchesHeads
from octavo_engine.config import MAX_SPECULATION
from octavo_engine.model_runner.drafter import has_penalties, num_useful
from octavo_engine.sampling.batch import SAMPLED_OK, SamplingBatch

if TYPE_CHECKING:
    from octavo_engine.backends.backend import DraftsByHeads, PendingSample, States
    from octavo_engine.model_runner.inputs import BuiltStep, Ints, StepInputs
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult


class _Place(NamedTuple):
    """Where an entry's next draft token goes, and how many are wanted from there on."""

    entry: int
    row: int
    position: int
    num_wanted: int
    state: int  # which of the states it is drafted from

    def following(self, state: int) -> _Place:
        """The next token's."""
        return self._replace(
            position=self.position + 1, num_wanted=self.num_wanted - 1, state=state
        )


class HeadDrafter:
    """Head k drafts the token that is k + 1 places behind the one that was sampled, from the state
    that was sampled from or that of the head before.

    It needs nothing of earlier steps, so a sequence can be drafted for in any step in which it
    samples. Draft tokens are drawn with the numbers of their positions, as the model's own will be.
    """

    def __init__(self, backend: DraftsByHeads, inputs: StepInputs) -> None:
        self._backend = backend
        self._launches = backend if isinstance(backend, LaunchesHeads) else None
        self._inputs = inputs

    def run(self, batch: ScheduledBatch, built: BuiltStep, result: StepResult) -> None:
        """Fill `result.proposed` and `result.draft_s`."""
        if not batch.num_proposed:
            return
        started = time.perf_counter()
        places = self._places(batch, result)
        if not places:
            return
        states = self._backend.hidden_rows(built.last_rows[[place.entry for place in places]])
        result.draft_tokens = len(places)
        rows = [place.row for place in places]
        if self._launches is not None and not has_penalties(self._inputs, rows):
            result.draft_passes = self._draft_ahead(self._launches, places, states, result.proposed)
        else:
            for head in range(self._backend.num_heads):
                result.draft_passes += 1
                places, states = self._draft(head, places, states, result.proposed)
                if not places:
                    break
        if self._launches is not None:
            result.draft_is_usual = self._launches.drafts_are_usual
        result.draft_s = time.perf_counter() - started

    def _draft_ahead(
        self,
        backend: LaunchesHeads,
        places: list[_Place],
        states: States,
        proposed: dict[int, list[int]],
    ) -> int:
        """All heads, launched one behind the other before any token is known: the device finds
        each, and each state, where the head before left it. Returns how many there were."""
        under_way: list[tuple[list[_Place], PendingSample]] = []
        for head in range(backend.num_heads):
            sampling = self._sampling(places)
            states = backend.pick_states(states, [place.state for place in places])
            tokens = None if head else self._tokens(sampling)
            pending, states = backend.launch_head(head, states, tokens, sampling)
            under_way.append((places, pending))
            places = [
                place.following(index) for index, place in enumerate(places) if place.num_wanted > 1
            ]
            if not places:
                break
        ended: set[int] = set()  # entries whose draws failed: what follows is worth nothing
        for drafting, pending in under_way:
            sampled = pending.wait()
            drawn = zip(drafting, sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
            for place, token, status in drawn:
                if status != SAMPLED_OK:
                    ended.add(place.entry)
                if place.entry not in ended:
                    self._note(place, token, proposed)
        return len(under_way)

    def _draft(
        self,
        head: int,
        places: list[_Place],
        states: States,
        proposed: dict[int, list[int]],
    ) -> tuple[list[_Place], States]:
        """One head's tokens. Returns the places of the next one's, and its states."""
        sampling = self._sampling(places)
        chosen = [place.state for place in places]
        if self._launches is not None:
            states = self._launches.pick_states(states, chosen)
        else:
            states = states[chosen]
        sampled, states = self._backend.draft_head(head, states, self._tokens(sampling), sampling)
        following = []
        drawn = zip(places, sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
        for index, (place, token, status) in enumerate(drawn):
            if status != SAMPLED_OK:
                continue
            self._note(place, token, proposed)
            if place.num_wanted > 1:
                following.append(place.following(index))
        return following, states

    def _sampling(self, places: list[_Place]) -> SamplingBatch:
        return SamplingBatch(
            table=self._inputs.table,
            rows=np.array([place.row for place in places], np.int32),
            positions=np.array([place.position for place in places], np.int32),
            targets=np.full(len(places), -1, np.int32),
            history=self._inputs.token_ids,
            fills=self._inputs.fills,
        )

    def _tokens(self, sampling: SamplingBatch) -> Ints:
        """Those that are known last."""
        tokens: Ints = self._inputs.token_ids[sampling.rows, sampling.positions - 1]
        return tokens

    def _note(self, place: _Place, token: int, proposed: dict[int, list[int]]) -> None:
        self._inputs.token_ids[place.row, place.position] = token
        proposed.setdefault(place.entry, []).append(token)

    def _places(self, batch: ScheduledBatch, result: StepResult) -> list[_Place]:
        """Of the entries that sampled a token which more can follow: as many as a step has room for
        drafts of."""
        places: list[_Place] = []
        skipped = {*result.failed, *result.deferred, *result.forced}
        for entry, sequence in enumerate(batch.sequences):
            if entry in skipped or not batch.samples[entry]:
                continue
            drafts = batch.drafts.get(entry, ())
            end = batch.starts[entry] + batch.counts[entry] - len(drafts)
            end += len(result.accepted.get(entry, ()))
            wanted = num_useful(sequence, end, result.tokens[entry], batch.num_proposed)
            if wanted:
                places.append(_Place(entry, batch.rows[entry], end + 1, wanted, len(places)))
            if len(places) == MAX_SPECULATION:
                break
        return places
