"""The flat arrays of a step, built from a scheduled batch and from what each row keeps.

A row's tokens, blocks and sampling parameters are written when its sequence is admitted and then
only grow, so a step gathers from them with a few numpy calls, however many sequences there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo_engine.backends.backend import BackendStep, StateStep
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.model_runner.row_params import RowParams
from octavo_engine.sampling.adjust import AdjustedRow, build_lists, ragged
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.processors import ProcessedRow
from octavo_engine.sampling.rows import fill_row, new_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.sampling.processors import ProcessorRegistry
    from octavo_engine.state.batch import BlockCopy, ScheduledBatch
    from octavo_engine.state.sequence import Sequence

Ints: TypeAlias = NDArray[np.int32]


@dataclass(slots=True)
class BuiltStep:
    """A step, and where in its logits each sequence of the batch finds its own.

    Entry i has the rows of logits [logit_starts[i], logit_starts[i + 1]). If it has drafts, all of
    them sample; otherwise all but a last one that samples are scored against tokens already known.
    """

    step: BackendStep
    sampling: SamplingBatch
    logit_starts: Ints  # [B + 1]
    last_rows: Ints  # [B]  row of logits in which each entry that samples has its token
    is_decode: bool  # each entry is one token that samples


class StepInputs:
    """The arrays of all rows: row r has tokens `token_ids[r, :n]`, and in group g of the layers
    blocks `block_tables[g, r, :m]`."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int = 1,
        has_states: bool = False,
        processors: ProcessorRegistry | None = None,
    ) -> None:
        width = -(-max_model_len // BLOCK_SIZE)
        # Zero pages: memory that no sequence ever reaches is never touched.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, width), np.int32)
        self._only_table = self.block_tables[0] if num_groups == 1 else None
        self.table_versions = np.zeros(max_num_seqs, np.int64)
        self.table = new_table(max_num_seqs)
        self.adapters = np.full(max_num_seqs, -1, np.int32)  # each row's slot; -1: none
        self._has_states = has_states
        self._num_adapted = 0  # rows that have one
        self.audio_slots = np.full(max_num_seqs, -1, np.int32)  # each row's; -1: none
        self._has_audio = False  # a row had some: then all have in such models
        self.fills = np.zeros(max_num_seqs, np.int64)  # how often each row got a new sequence
        self.row_params = RowParams(processors)
        # Constants to take slices of.
        self._arange = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._no_targets = np.full(max_num_seqs, -1, np.int32)
        self._no_copies = np.zeros((0, 3), np.int32)

    def build(self, batch: ScheduledBatch) -> BuiltStep:
        """Take in what changed since the last step, then lay out this one."""
        for sequence in batch.admitted:
            self._admit(sequence)
        for row, place, block_id, group in batch.grown:
            self.block_tables[group, row, place] = block_id
            self.table_versions[row] += 1
        for index, drafts in batch.drafts.items():
            end = batch.starts[index] + batch.counts[index]
            self.token_ids[batch.rows[index], end - len(drafts) : end] = drafts
        rows = np.array(batch.rows, np.int32)
        starts = np.array(batch.starts, np.int32)
        is_decode = (
            max(batch.counts, default=0) == 1 == min(batch.num_logits) == max(batch.num_logits)
            and all(batch.samples)
        )  # fmt: skip
        layout = self._decode_step if is_decode else self._mixed_step
        built = layout(batch, rows, starts)
        if self._num_adapted:
            built.step.adapters = self.adapters[rows]
        if self._has_audio:
            built.step.audio_slots = self.audio_slots[rows]
        if self._has_states:
            built.step.states = _states(batch, built.step)
        if batch.awaited:
            built.step.awaited = awaited = np.full(len(built.step.token_ids), -1, np.int32)
            awaited[built.step.seq_starts[batch.awaited]] = rows[batch.awaited]
            built.sampling.awaited = is_awaited = np.zeros(len(built.sampling.rows), bool)
            is_awaited[built.last_rows[batch.awaited]] = True
        self._add_row_params(batch, built)
        return built

    def draft_step(
        self, rows: Ints, firsts: Ints, counts: Ints, wants: NDArray[np.bool_], *, ahead: int = 0
    ) -> tuple[BackendStep, SamplingBatch]:
        """The tokens [first, first + count) of some rows, for the draft model. Those that want it
        sample the token behind their last one. All tokens are those so many places `ahead`."""
        seq_starts = _offsets(counts)
        positions = _ranges(firsts, counts, seq_starts)
        token_rows = np.repeat(rows, counts)
        ends = firsts + counts
        step = BackendStep(
            token_ids=self.token_ids[token_rows, positions + ahead],
            positions=positions,
            slots=self._slots(token_rows, positions),
            seq_starts=seq_starts,
            seq_lens=ends,
            rows=rows,
            block_tables=self.block_tables,
            logit_rows=(seq_starts[1:] - 1)[wants],
            copies=self._no_copies,
            table_versions=self.table_versions,
        )
        sampling = SamplingBatch(
            table=self.table,
            rows=rows[wants],
            positions=ends[wants] + ahead,
            targets=self._no_targets[: np.count_nonzero(wants)],
            history=self.token_ids,
            fills=self.fills,
        )
        return step, sampling

    def store(self, rows: Ints, positions: Ints, tokens: Ints) -> None:
        """Append sampled tokens to their rows; the next step computes them."""
        self.token_ids[rows, positions] = tokens

    def _admit(self, sequence: Sequence) -> None:
        row = sequence.row
        self.fills[row] += 1
        self._num_adapted += int(sequence.adapter_slot >= 0) - int(self.adapters[row] >= 0)
        self.adapters[row] = sequence.adapter_slot
        audio = sequence.request.audio
        self.audio_slots[row] = slot = -1 if audio is None else audio.slot
        self._has_audio = self._has_audio or slot >= 0
        self.token_ids[row, : len(sequence.token_ids)] = sequence.token_ids
        for group, table in enumerate(sequence.block_tables):
            self.block_tables[group, row, : len(table)] = table
        self.table_versions[row] += 1
        fill_row(self.table, row, sequence.request)
        self.row_params.fill(row, sequence.request)

    def _slots(self, rows: Ints, positions: Ints) -> Ints:
        """[G, T]: where each of the rows' tokens goes."""
        blocks, offsets = np.divmod(positions, BLOCK_SIZE)
        if self._only_table is not None:
            slots: Ints = self._only_table[rows, blocks] * BLOCK_SIZE + offsets
            return slots[None]
        return np.ascontiguousarray(self.block_tables[:, rows, blocks] * BLOCK_SIZE + offsets)

    def _copies(self, copies: list[BlockCopy]) -> Ints:
        return np.array(copies, np.int32) if copies else self._no_copies

    def _decode_step(self, batch: ScheduledBatch, rows: Ints, positions: Ints) -> BuiltStep:
        # Hot path: once per step of nothing but decoding.
        num_seqs = len(rows)
        ends = positions + 1
        ramp = self._arange[: num_seqs + 1]
        step = BackendStep(
            token_ids=self.token_ids[rows, positions],
            positions=positions,
            slots=self._slots(rows, positions),
            seq_starts=ramp,
            seq_lens=ends,
            rows=rows,
            block_tables=self.block_tables,
            logit_rows=ramp[:num_seqs],
            copies=self._copies(batch.copies),
            table_versions=self.table_versions,
        )
        sampling = SamplingBatch(
            table=self.table,
            rows=rows,
            positions=ends,
            targets=self._no_targets[:num_seqs],
            history=self.token_ids,
            fills=self.fills,
        )
        return BuiltStep(step, sampling, ramp, ramp[:num_seqs], is_decode=True)

    def _mixed_step(self, batch: ScheduledBatch, rows: Ints, starts: Ints) -> BuiltStep:
        counts = np.array(batch.counts, np.int32)
        num_logits = np.array(batch.num_logits, np.int32)
        samples = np.array(batch.samples, bool)
        seq_starts, logit_starts = _offsets(counts), _offsets(num_logits)
        positions = _ranges(starts, counts, seq_starts)
        token_rows = np.repeat(rows, counts)
        logit_rows = _ranges(seq_starts[1:] - num_logits, num_logits, logit_starts)
        after = positions[logit_rows] + 1
        logit_owners = np.repeat(rows, num_logits)
        targets = np.full(len(logit_rows), -1, np.int32)
        is_scored = np.ones(len(logit_rows), bool)
        is_scored[logit_starts[1:][samples] - 1] = False
        for index in batch.drafts:
            is_scored[logit_starts[index] : logit_starts[index + 1]] = False
        targets[is_scored] = self.token_ids[logit_owners[is_scored], after[is_scored]]
        step = BackendStep(
            token_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slots=self._slots(token_rows, positions),
            seq_starts=seq_starts,
            seq_lens=starts + counts,
            rows=rows,
            block_tables=self.block_tables,
            logit_rows=logit_rows,
            copies=self._copies(batch.copies),
            table_versions=self.table_versions,
        )
        sampling = SamplingBatch(
            table=self.table,
            rows=logit_owners,
            positions=after,
            targets=targets,
            history=self.token_ids,
            fills=self.fills,
        )
        return BuiltStep(step, sampling, logit_starts, logit_starts[1:] - 1, is_decode=False)

    def _add_row_params(self, batch: ScheduledBatch, built: BuiltStep) -> None:
        """Adjustments, processors and log-probabilities, of the rows that want them."""
        row_params, sampling = self.row_params, built.sampling
        if row_params.adjustments or row_params.processors:
            self._add_edits(batch, built)
        wanted = -1
        if row_params.logprobs:
            wanted = max((row_params.logprobs.get(row, -1) for row in batch.rows), default=-1)
        if row_params.prompt_logprobs and not built.is_decode:
            of_rows = (row_params.prompt_logprobs.get(row, -1) for row in batch.rows)
            wanted = max(wanted, max(of_rows, default=-1))
        sampling.num_logprobs = wanted
        if row_params.logprob_ids:
            lists = {
                index: row_params.logprob_ids[row]
                for row, indices in _sampled_rows(batch, built)
                if row in row_params.logprob_ids
                for index in indices
            }
            sampling.logprob_ids = ragged(lists, len(sampling.rows))

    def _add_edits(self, batch: ScheduledBatch, built: BuiltStep) -> None:
        row_params, sampling = self.row_params, built.sampling
        adjusted: list[AdjustedRow] = []
        processed: list[ProcessedRow] = []
        for row, indices in _sampled_rows(batch, built):
            adjustments, processors = (
                row_params.adjustments.get(row),
                row_params.processors.get(row),
            )
            if adjustments is None and processors is None:
                continue
            for index in indices:
                tokens = self.token_ids[row, : int(sampling.positions[index])]
                if adjustments is not None:
                    num_prompt_tokens = int(self.table["num_prompt_tokens"][row])
                    adjusted.append(AdjustedRow(index, adjustments, tokens[num_prompt_tokens:]))
                if processors is not None:
                    processed.append(ProcessedRow(index, processors, tokens))
        sampling.bias, sampling.allowed = build_lists(adjusted, len(sampling.rows))
        sampling.processed = processed


def _states(batch: ScheduledBatch, step: BackendStep) -> StateStep:
    """A row's own slot has its number; snapshots lie behind those."""
    saves = np.full(len(step.token_ids), -1, np.int32)
    for index, num_tokens, slot in batch.state_saves:
        saves[step.seq_starts[index] + num_tokens - 1 - batch.starts[index]] = slot
    copies = np.array(batch.state_loads, np.int32).reshape(-1, 2)
    return StateStep(slots=step.rows, saves=saves, copies=copies)


def _sampled_rows(batch: ScheduledBatch, built: BuiltStep) -> Iterator[tuple[int, range]]:
    """Row of each sequence that samples, and the rows of logits in which it does."""
    ends = built.logit_starts[1:].tolist()
    for i, row in enumerate(batch.rows):
        if batch.samples[i]:
            yield row, range(ends[i] - 1 - len(batch.drafts.get(i, ())), ends[i])


def _offsets(lengths: Ints) -> Ints:
    """Where each of the parts begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _ranges(firsts: Ints, lengths: Ints, offsets: Ints) -> Ints:
    """The ranges firsts[i], firsts[i] + 1, … of the given lengths, one behind the other."""
    ramp = np.arange(offsets[-1], dtype=np.int32)
    return ramp + np.repeat(firsts - offsets[:-1], lengths)
