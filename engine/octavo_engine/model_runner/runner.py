"""Executes a scheduled batch on a backend and says what came of each sequence. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from octavo_engine.backends.backend import (
    DraftsByHeads,
    DraftsFromStates,
    DraftsTokens,
    EncodesAudio,
    LaunchesSteps,
    PreparesSteps,
    TakesAdapters,
)
from octavo_engine.backends.media import TakesMedia
from octavo_engine.grammar.masks import StepMasks
from octavo_engine.model_runner.drafter import Drafter
from octavo_engine.model_runner.head_drafter import HeadDrafter
from octavo_engine.model_runner.inputs import StepInputs
from octavo_engine.model_runner.media_rows import Encoded, MediaRows
from octavo_engine.model_runner.state_drafter import StateDrafter
from octavo_engine.model_runner.verify import accept_drafts
from octavo_engine.profile import Lapped
from octavo_engine.sampling.batch import SAMPLED_NOTHING_ALLOWED, SAMPLED_OK
from octavo_engine.state.outputs import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import Backend, BackendLimits, PendingSample
    from octavo_engine.config import SchedulerConfig
    from octavo_engine.model_runner.inputs import BuiltStep
    from octavo_engine.profile import Laps
    from octavo_engine.sampling.batch import Sampled
    from octavo_engine.sampling.processors import ProcessorRegistry
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.sequence_grammar import SequenceGrammar


class Guided(NamedTuple):
    """The masks of a step, and whose they are."""

    masks: StepMasks
    runs: list[SequenceGrammar]
    entries: list[int]  # of the batch

    def num_masked(self) -> dict[int, int]:
        """How many of its rows each entry has masks for."""
        return {
            entry: 1 + len(run.masks_ahead)
            for run, entry in zip(self.runs, self.entries, strict=True)
            if run.is_ready
        }


class Launched(NamedTuple):
    """A batch that computes."""

    batch: ScheduledBatch
    built: BuiltStep
    guided: Guided | None
    pending: PendingSample
    fills: NDArray[np.int64]  # of its rows, when it was built


class ModelRunner:
    """One backend, prepared already, and the arrays of its rows."""

    def __init__(
        self,
        backend: Backend,
        *,
        scheduler_config: SchedulerConfig,
        limits: BackendLimits,
        processors: ProcessorRegistry | None = None,
    ) -> None:
        self.backend = backend
        self.laps: Laps | None = None  # while steps are recorded
        self.inputs = StepInputs(
            max_num_seqs=scheduler_config.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_groups=len(backend.cache_layout.groups),
            has_states=bool(backend.cache_layout.states),
            processors=processors,
        )
        self._drafter: Drafter | StateDrafter | HeadDrafter | None = None
        if isinstance(backend, DraftsTokens) and backend.has_draft:
            has_windows = any(window is not None for window in backend.cache_layout.windows)
            self._drafter = Drafter(backend, self.inputs, limits, has_windows=has_windows)
        if isinstance(backend, DraftsFromStates) and backend.has_draft_head:
            self._drafter = StateDrafter(backend, self.inputs, limits)
        if isinstance(backend, DraftsByHeads) and backend.num_heads:
            self._drafter = HeadDrafter(backend, self.inputs)
        self._media: MediaRows | None = None
        if isinstance(backend, TakesMedia) and backend.media is not None:
            self._media = MediaRows(backend.media)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch. Sampled tokens are noted in the rows, ready for the next step."""
        encoded = Encoded() if self._media is None else self._media.take(batch)
        built, guided = self._build(batch)
        if self._media is not None:
            self._media.add_to(built.step, batch)
        sampled = self.backend.execute(built.step, built.sampling)
        if self.laps is not None:
            self.laps.mark("sample" if isinstance(self.backend, Lapped) else "execute")
        result = self._take(batch, built, guided, sampled)
        result.encode_s, result.encode_error = encoded
        if isinstance(self.backend, PreparesSteps):
            result.is_usual = self.backend.step_was_usual
        if self._drafter is not None and batch.sequences:
            self._drafter.run(batch, built, result)
            if self.laps is not None:
                self.laps.mark("draft")
        return result

    def time_picture(self) -> float:
        """About how many seconds a row of one takes; 0 where the model does not see."""
        return 0.0 if self._media is None else self._media.time_picture()

    def launch(self, batch: ScheduledBatch) -> Launched:
        """Have the backend begin with it; only for one that launches."""
        assert isinstance(self.backend, LaunchesSteps)
        built, guided = self._build(batch)
        pending = self.backend.launch(built.step, built.sampling)
        if self.laps is not None:
            self.laps.mark("launch")
        return Launched(batch, built, guided, pending, self.inputs.fills[built.step.rows])

    def land(self, launched: Launched) -> StepResult:
        """Wait for it. Tokens are noted in rows that still belong to the same sequences."""
        batch, built, guided, pending, fills = launched
        sampled = pending.wait()
        if self.laps is not None:
            self.laps.mark("wait")
        is_same = self.inputs.fills[built.step.rows] == fills
        return self._take(batch, built, guided, sampled, is_same=is_same)

    def _build(self, batch: ScheduledBatch) -> tuple[BuiltStep, Guided | None]:
        for slot, adapter in batch.placed:
            assert isinstance(self.backend, TakesAdapters)
            self.backend.set_adapter(slot, adapter.packed)
        built = self.inputs.build(batch)
        guided = self._guide(batch, built) if any(s.grammar for s in batch.sequences) else None
        if self.laps is not None:
            self.laps.mark("inputs")
        return built, guided

    def _take(
        self,
        batch: ScheduledBatch,
        built: BuiltStep,
        guided: Guided | None,
        sampled: Sampled,
        *,
        is_same: NDArray[np.bool_] | None = None,
    ) -> StepResult:
        """`is_same`: which entries' rows are theirs still; None: all."""
        if built.is_decode:
            rows, positions, tokens = built.step.rows, built.sampling.positions, sampled.tokens
            if is_same is not None:
                rows, positions, tokens = rows[is_same], positions[is_same], tokens[is_same]
            self.inputs.store(rows, positions, tokens)
            result = StepResult(tokens=sampled.tokens.tolist())
        else:
            num_masked = {} if guided is None else guided.num_masked()
            accepted = accept_drafts(batch, built, sampled, num_masked) if batch.drafts else {}
            tokens_of = self._take_tokens(batch, built, sampled, is_same)
            result = StepResult(tokens_of, accepted=accepted)
        if np.count_nonzero(sampled.status):
            self._take_failures(batch, built, sampled, result)
        if guided is not None:
            self._take_guided(batch, built, guided, result)
        if sampled.logprobs is not None:
            self._take_logprobs(batch, built, sampled, result)
        return result

    def _guide(self, batch: ScheduledBatch, built: BuiltStep) -> Guided | None:
        """Have the masks made while the forward pass runs."""
        runs, rows, entries = [], [], []
        ends = built.logit_starts[1:].tolist()
        for i, sequence in enumerate(batch.sequences):
            if sequence.grammar is not None and batch.samples[i]:
                runs.append(sequence.grammar)
                rows.append(range(ends[i] - 1 - len(batch.drafts.get(i, ())), ends[i]))
                entries.append(i)
        if not runs:
            return None
        masks = StepMasks(runs, rows, len(built.sampling.rows))
        built.sampling.masks = masks
        return Guided(masks, runs, entries)

    def _take_guided(
        self, batch: ScheduledBatch, built: BuiltStep, guided: Guided, result: StepResult
    ) -> None:
        """Which entries got no mask in time, and what must follow the tokens of the others."""
        late = set(guided.masks.late)
        for index, (run, entry) in enumerate(zip(guided.runs, guided.entries, strict=True)):
            if index in late:
                if entry not in result.failed:
                    result.deferred.append(entry)
                    result.tokens[entry] = -1
                    result.accepted.pop(entry, None)
            elif run.forced and result.tokens[entry] >= 0:
                result.forced[entry] = run.forced
                row = batch.rows[entry]
                position = int(built.sampling.positions[built.last_rows[entry]]) + 1
                room = self.inputs.token_ids[row, position : position + len(run.forced)]
                room[:] = run.forced[: len(room)]

    def _take_tokens(
        self,
        batch: ScheduledBatch,
        built: BuiltStep,
        sampled: Sampled,
        is_same: NDArray[np.bool_] | None,
    ) -> list[int]:
        entries = np.flatnonzero(batch.samples)
        tokens = np.full(len(batch.sequences), -1, np.int32)
        tokens[entries] = sampled.tokens[built.last_rows[entries]]
        if is_same is not None:
            entries = entries[is_same[entries]]
        last = built.last_rows[entries]
        self.inputs.store(built.step.rows[entries], built.sampling.positions[last], tokens[entries])
        result: list[int] = tokens.tolist()
        return result

    def _take_failures(
        self, batch: ScheduledBatch, built: BuiltStep, sampled: Sampled, result: StepResult
    ) -> None:
        bad_rows = np.flatnonzero(sampled.status != SAMPLED_OK)
        entries = np.searchsorted(built.logit_starts, bad_rows, side="right") - 1
        if batch.drafts:  # a row behind a draft that did not come true may be what it likes
            counts = bad_rows <= built.last_rows[entries]
            bad_rows, entries = bad_rows[counts], entries[counts]
        result.failed = sorted(set(entries.tolist()))
        is_spoiled = sampled.status[bad_rows] != SAMPLED_NOTHING_ALLOWED
        spoiled = set(entries[is_spoiled].tolist())
        result.forbidden = [i for i in result.failed if i not in spoiled]
        for i in result.failed:
            result.tokens[i] = -1

    def _take_logprobs(
        self, batch: ScheduledBatch, built: BuiltStep, sampled: Sampled, result: StepResult
    ) -> None:
        row_params = self.inputs.row_params
        failed = set(result.failed)
        starts = built.logit_starts.tolist()
        for i, row in enumerate(batch.rows):
            if i in failed:
                continue
            wanted = row_params.logprobs.get(row)
            if wanted is not None and batch.samples[i]:
                last = int(built.last_rows[i])
                rows = range(last - len(result.accepted.get(i, ())), last + 1)
                result.logprobs[i] = [_logprobs(sampled, s, wanted) for s in rows]
            if i in batch.drafts:
                continue
            wanted = row_params.prompt_logprobs.get(row)
            scored = range(starts[i], starts[i + 1] - batch.samples[i])
            if wanted is not None and scored:
                found = [_logprobs(sampled, s, wanted) for s in scored]
                result.prompt_logprobs[i] = self._aligned(batch, built, i, scored, found)

    def _aligned(
        self, batch: ScheduledBatch, built: BuiltStep, index: int, scored: range,
        found: list[TokenLogprobs],
    ) -> list[TokenLogprobs]:  # fmt: skip
        """With the attention to a window of audio, where the sequence wants it."""
        audio = batch.sequences[index].request.audio
        if audio is None or not audio.aligned_rows:
            return found
        assert isinstance(self.backend, EncodesAudio)
        tokens = built.step.logit_rows[scored.start : scored.stop]
        weights = self.backend.audio_attention(audio.slot, tokens, audio.aligned_rows)
        return [
            msgspec.structs.replace(each, attention=own.astype(np.float16).tobytes())
            for each, own in zip(found, weights, strict=True)
        ]


def _logprobs(sampled: Sampled, s: int, num_top: int) -> TokenLogprobs:
    assert sampled.logprobs is not None and sampled.ranks is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    top_ids = [token for token in sampled.top_ids[s, :num_top].tolist() if token >= 0]
    return TokenLogprobs(
        token_id=int(sampled.tokens[s]),
        logprob=float(sampled.logprobs[s]),
        rank=int(sampled.ranks[s]),
        top_ids=top_ids,
        top_logprobs=sampled.top_logprobs[s, : len(top_ids)].tolist(),
    )
