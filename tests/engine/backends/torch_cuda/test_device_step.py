"""What lies where in the buffer that is sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendStep
from octavo_engine.backends.torch.device_step import (
    StepBuffer,
    StepSizes,
    cut_tiles,
    cut_walks,
    is_decode,
)
from tests.engine.backends.torch_cuda.steps import LIMITS, make_sampling, make_step


def test_tiles_cut_each_sequence_by_itself():
    tiles = cut_tiles(np.array([0, 5, 6, 14], np.int32), 4)
    assert tiles.seqs.tolist() == [0, 0, 1, 2, 2]
    assert tiles.starts.tolist() == [0, 4, 0, 0, 4]


def test_only_a_token_a_sequence_with_all_logits_is_decoding():
    assert is_decode(make_step([(3, 1), (0, 1)]))
    assert not is_decode(make_step([(3, 2), (0, 1)]))
    assert not is_decode(make_step([(0, 2)], all_logits=True))


def test_a_padded_step_reads_as_the_step_and_rows_of_nothing(device):
    step = make_step([(40, 1), (3, 1), (17, 1)], token_ids=[[7], [8], [9]])
    sampling = make_sampling(3, seed=[1, 2**40 + 5, 2**64 - 1], temperature=[0, 0.5, 1e-6],
                             top_k=[0, 4, 0], top_p=[1, 1, 0.5])  # fmt: skip
    sizes = StepSizes.of_decode(5)
    buffer = StepBuffer(LIMITS, device)
    buffer.send(buffer.fill(step, sampling, cut_walks(step.seq_lens, 0), sizes))
    view = buffer.step(sizes, is_decode=True, max_seq_len=256, host=None)
    assert view.token_ids.tolist() == [7, 8, 9, 0, 0]
    assert view.positions.tolist() == [40, 3, 17, 0, 0]
    assert view.slots.tolist() == [*step.slots[0].tolist(), -1, -1]
    assert view.seq_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.seq_lens.tolist() == [41, 4, 18, 0, 0]
    assert view.logit_rows.tolist() == [0, 1, 2, 0, 0]
    assert view.tile_seqs.tolist() == [0, 1, 2, 3, 4]
    assert view.table_starts.tolist() == [*(step.rows * 16).tolist(), 0, 0]
    tables = view.tables.cpu().numpy().reshape(-1, 16)
    for row, blocks in zip(step.rows, (3, 1, 2), strict=True):  # 41 tokens take 3 blocks
        assert tables[row, :blocks].tolist() == step.block_tables[0, row, :blocks].tolist()
    params = buffer.draw_params(sizes)
    assert params.seeds.tolist() == [[1, 5, -1, 0, 0], [0, 256, -1, 0, 0]]
    assert params.targets.tolist() == [-1] * 5
    assert params.inverse_temperatures.tolist() == [0, 2, 0, 0, 0]
    assert params.leasts.tolist() == [-np.inf, -32, -32, -np.inf, -np.inf]
    assert params.top_ks.tolist() == [0, 4, 0, 0, 0]
    assert params.first(2).seeds.tolist() == [[1, 5], [0, 256]]


def test_a_smaller_step_leaves_nothing_of_the_one_before(device):
    buffer, sizes = StepBuffer(LIMITS, device), StepSizes.of_decode(4)
    for sequences in ([(40, 1)] * 4, [(3, 1)]):
        step = make_step(sequences)
        sampling = make_sampling(len(sequences), temperature=1.0, min_p=0.5)
        buffer.send(buffer.fill(step, sampling, cut_walks(step.seq_lens, 0), sizes))
    view = buffer.step(sizes, is_decode=True, max_seq_len=256, host=None)
    assert view.slots.tolist()[1:] == [-1, -1, -1]
    assert view.seq_lens.tolist() == [4, 0, 0, 0]
    params = buffer.draw_params(sizes)
    assert params.inverse_temperatures.tolist() == [1, 0, 0, 0]
    assert torch.isinf(params.leasts[1:]).all()


class Rows:
    """Rows of a runner whose sequences come, grow and leave, with its tables."""

    def __init__(self, *, num_rows: int, width: int, is_counted: bool) -> None:
        self.rng = np.random.default_rng(11)
        self.tables = np.zeros((num_rows, width), np.int32)
        self.versions = np.zeros(num_rows, np.int64) if is_counted else None
        self.blocks = np.zeros(num_rows, int)  # 0: nobody's
        self.computed = np.zeros(num_rows, int)
        self.num_written = 0

    def turn(self) -> BackendStep:
        for row in range(len(self.tables)):
            chance = self.rng.random()
            if self.blocks[row] == 0 and chance < 0.2:
                blocks = int(self.rng.integers(1, self.tables.shape[1] // 2))
                self._write(row, 0, self.rng.integers(1, 999, blocks))
                is_cached = self.rng.random() < 0.5
                self.computed[row] = 16 * (blocks - 1) if is_cached else 0
            elif chance < 0.01:  # it ends, or is preempted and comes back elsewhere
                self.blocks[row] = 0
        rows = np.flatnonzero(self.blocks).astype(np.int32)
        rows = self.rng.permutation(rows)[: max(1, len(rows) * 3 // 4)]
        for row in rows.tolist():
            # A chunk of a prompt whose table is whole already, or a token that may want a block.
            count = int(self.rng.integers(1, 40)) if self.rng.random() < 0.3 else 1
            self.computed[row] = min(self.computed[row] + count, self.tables.shape[1] * 16)
            needed = -(-int(self.computed[row]) // 16)
            if needed > self.blocks[row]:
                new = self.rng.integers(1, 999, needed - self.blocks[row])
                self._write(row, int(self.blocks[row]), new)
        return self.step_of(rows)

    def step_of(self, rows) -> BackendStep:
        zeros, lengths = np.zeros(len(rows), np.int32), self.computed[rows].astype(np.int32)
        ramp = np.arange(len(rows) + 1, dtype=np.int32)
        return BackendStep(
            token_ids=zeros, positions=lengths - 1, slots=zeros[None], seq_starts=ramp,
            seq_lens=lengths, rows=rows, block_tables=self.tables[None], logit_rows=ramp[:-1],
            copies=np.zeros((0, 3), np.int32), table_versions=self.versions,
        )  # fmt: skip

    def _write(self, row, first, blocks) -> None:
        self.tables[row, first : first + len(blocks)] = blocks
        self.blocks[row] = first + len(blocks)
        self.num_written += len(blocks)
        if self.versions is not None:
            self.versions[row] += 1


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("model_len", [256, 16_384])
def test_tables_on_the_device_equal_the_whole_ones_at_every_step(model_len, is_counted, device):
    """Long ones come in parts too large for a step's buffer."""
    limits = dataclasses.replace(LIMITS, max_model_len=model_len)
    rows = Rows(num_rows=limits.max_seqs, width=model_len // 16, is_counted=is_counted)
    buffer = StepBuffer(limits, device)
    num_sent, num_whole, longest = 0, 0, 0
    for number in range(300):
        step = rows.turn()
        if not len(step.rows):
            continue
        sizes = StepSizes.of_decode(len(step.rows))
        sampling = make_sampling(len(step.rows))
        filled = buffer.fill(step, sampling, cut_walks(step.seq_lens, 0), sizes)
        if number % 50 == 49:
            continue  # the step failed before it was sent: nothing of it is there
        buffer.send(filled)
        view = buffer.step(sizes, is_decode=True, max_seq_len=model_len, host=None)
        tables, starts = view.tables.cpu().numpy(), view.table_starts.tolist()
        for row, start, length in zip(step.rows, starts, step.seq_lens, strict=True):
            blocks = -(-length // 16)
            assert tables[start : start + blocks].tolist() == rows.tables[row, :blocks].tolist()
            num_whole += blocks
        longest = max(longest, len(filled.changes.places))
        num_sent += len(filled.changes.places)
    assert 0 < num_sent <= rows.num_written
    assert num_sent < num_whole / 5
    assert (longest > 4 * limits.max_seqs) == (model_len > 256)


def test_a_step_without_new_blocks_sends_the_words_of_its_layout_alone(device):
    buffer = StepBuffer(LIMITS, device)
    step, sizes = make_step([(40, 1), (3, 1)]), StepSizes.of_decode(2)
    for expected in (4, 0):
        filled = buffer.fill(step, make_sampling(2), cut_walks(step.seq_lens, 0), sizes)
        buffer.send(filled)
        assert len(filled.changes.places) == expected
