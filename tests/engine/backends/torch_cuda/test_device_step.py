"""What lies where in the buffer that is sent."""

from __future__ import annotations

import numpy as np
import torch

from octavo_engine.backends.torch.device_step import StepBuffer, StepSizes, cut_tiles, is_decode
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
    buffer.send(buffer.fill(step, sampling, cut_tiles(step.seq_starts, 1), sizes))
    view = buffer.step(sizes, is_decode=True, max_seq_len=256, host=None)
    assert view.token_ids.tolist() == [7, 8, 9, 0, 0]
    assert view.positions.tolist() == [40, 3, 17, 0, 0]
    assert view.slots.tolist() == [*step.slots.tolist(), -1, -1]
    assert view.seq_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.seq_lens.tolist() == [41, 4, 18, 0, 0]
    assert view.logit_rows.tolist() == [0, 1, 2, 0, 0]
    assert view.tile_seqs.tolist() == [0, 1, 2, 3, 4]
    assert view.table_starts.tolist() == [0, 3, 6, 0, 0]  # 41 tokens take 3 blocks
    tables = step.block_tables[step.rows, :3]
    assert view.tables[:9].tolist() == tables.reshape(-1).tolist()
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
        buffer.send(buffer.fill(step, sampling, cut_tiles(step.seq_starts, 1), sizes))
    view = buffer.step(sizes, is_decode=True, max_seq_len=256, host=None)
    assert view.slots.tolist()[1:] == [-1, -1, -1]
    assert view.seq_lens.tolist() == [4, 0, 0, 0]
    params = buffer.draw_params(sizes)
    assert params.inverse_temperatures.tolist() == [1, 0, 0, 0]
    assert torch.isinf(params.leasts[1:]).all()
