"""Has heads propose how sequences go on, from the hidden states of the step that sampled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.config import MAX_SPECULATION
from octavo_engine.model_runner.drafter import num_useful
from octavo_engine.sampling.batch import SAMPLED_OK, SamplingBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import DraftsByHeads
    from octavo_engine.model_runner.inputs import BuiltStep, StepInputs
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult


class _Place(NamedTuple):
    """Where an entry's next draft token goes, and how many are wanted from there on."""

    entry: int
    row: int
    position: int
    num_wanted: int
    state: int  # which of the states it is drafted from


class HeadDrafter:
    """Head k drafts the token that is k + 1 places behind the one that was sampled, from the state
    that was sampled from or that of the head before.

    It needs nothing of earlier steps, so a sequence can be drafted for in any step in which it
    samples. Draft tokens are drawn with the numbers of their positions, as the model's own will be.
    """

    def __init__(self, backend: DraftsByHeads, inputs: StepInputs) -> None:
        self._backend = backend
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
        for head in range(self._backend.num_heads):
            result.draft_passes += 1
            places, states = self._draft(head, places, states, result.proposed)
            if not places:
                break
        result.draft_s = time.perf_counter() - started

    def _draft(
        self,
        head: int,
        places: list[_Place],
        states: NDArray[np.float32],
        proposed: dict[int, list[int]],
    ) -> tuple[list[_Place], NDArray[np.float32]]:
        """One head's tokens. Returns the places of the next one's, and its states."""
        rows = np.array([place.row for place in places], np.int32)
        positions = np.array([place.position for place in places], np.int32)
        sampling = SamplingBatch(
            table=self._inputs.table,
            rows=rows,
            positions=positions,
            targets=np.full(len(places), -1, np.int32),
            history=self._inputs.token_ids,
            fills=self._inputs.fills,
        )
        states = states[[place.state for place in places]]
        tokens = self._inputs.token_ids[rows, positions - 1]
        sampled, states = self._backend.draft_head(head, states, tokens, sampling)
        following = []
        drawn = zip(places, sampled.tokens.tolist(), sampled.status.tolist(), strict=True)
        for index, (place, token, status) in enumerate(drawn):
            if status != SAMPLED_OK:
                continue
            self._inputs.token_ids[place.row, place.position] = token
            proposed.setdefault(place.entry, []).append(token)
            if place.num_wanted > 1:
                position, num_wanted = place.position + 1, place.num_wanted - 1
                following.append(_Place(place.entry, place.row, position, num_wanted, index))
        return following, states

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
