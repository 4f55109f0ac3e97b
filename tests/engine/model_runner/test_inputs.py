"""The arrays of a step, value by value."""

from __future__ import annotations

from dataclasses import MISSING, fields

import numpy as np

from octavo_engine.model_runner.inputs import StepInputs
from octavo_engine.state.batch import BlockCopy, BlockGrowth, ScheduledBatch
from tests.engine.model_runner.building import make_request, make_sequence


def make_inputs() -> StepInputs:
    return StepInputs(max_num_seqs=4, max_model_len=64)


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_and_a_chunk_lie_one_behind_the_other() -> None:
    whole = make_sequence(make_request(ids(100, 3)), row=2, blocks=[7])
    chunk = make_sequence(make_request(ids(200, 40)), row=0, blocks=[5, 3, 9])
    batch = ScheduledBatch(
        sequences=[whole, chunk],
        rows=[2, 0],
        starts=[0, 14],
        counts=[3, 4],
        num_logits=[1, 0],
        samples=[True, False],
        admitted=[whole, chunk],
    )
    built = make_inputs().build(batch)
    step, sampling = built.step, built.sampling
    assert step.token_ids.tolist() == [100, 101, 102, 214, 215, 216, 217]
    assert step.positions.tolist() == [0, 1, 2, 14, 15, 16, 17]
    assert step.slots.tolist() == [[112, 113, 114, 94, 95, 48, 49]]
    assert step.seq_starts.tolist() == [0, 3, 7]
    assert step.seq_lens.tolist() == [3, 18]
    assert step.rows.tolist() == [2, 0]
    assert step.block_tables[0, 0].tolist() == [5, 3, 9, 0]
    assert step.logit_rows.tolist() == [2]
    assert step.copies.shape == (0, 3)
    assert sampling.rows.tolist() == [2]
    assert sampling.positions.tolist() == [3]
    assert sampling.targets.tolist() == [-1]
    assert sampling.history[2, :3].tolist() == [100, 101, 102]
    assert not built.is_decode
    assert step.awaited is None
    assert step.table_versions is not None
    assert step.table_versions.tolist() == [1, 0, 1, 0]
    arrays = [each.name for each in fields(step) if each.default is MISSING]
    assert all(getattr(step, name).dtype == np.int32 for name in arrays)


def test_decoding_gives_the_same_arrays_by_its_short_way() -> None:
    inputs = make_inputs()
    pair = [
        make_sequence(make_request(ids(100, 17)), row=3, blocks=[7, 8]),
        make_sequence(make_request(ids(200, 33)), row=1, blocks=[4, 5, 6]),
    ]
    batch = ScheduledBatch(
        sequences=pair,
        rows=[3, 1],
        starts=[16, 32],
        counts=[1, 1],
        num_logits=[1, 1],
        samples=[True, True],
        admitted=pair,
    )
    short = inputs.build(batch)
    assert short.is_decode
    long = inputs._mixed_step(batch, np.array([3, 1], np.int32), np.array([16, 32], np.int32))
    for got, expected in ((short.step, long.step), (short.sampling, long.sampling)):
        for name in ("token_ids", "positions", "slots", "seq_starts", "seq_lens", "logit_rows",
                     "rows", "targets"):  # fmt: skip
            if hasattr(got, name):
                assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
                assert getattr(got, name).dtype == np.int32, name
    assert short.step.slots.tolist() == [[128, 96]]
    assert short.logit_starts.tolist() == long.logit_starts.tolist()


def test_scored_positions_have_the_next_token_as_target() -> None:
    sequence = make_sequence(make_request(ids(50, 20), prompt_logprobs=1), row=1, blocks=[2, 3])
    batch = ScheduledBatch(
        sequences=[sequence],
        rows=[1],
        starts=[0],
        counts=[8],
        num_logits=[8],
        samples=[False],
        admitted=[sequence],
    )
    inputs = make_inputs()
    built = inputs.build(batch)
    assert built.step.logit_rows.tolist() == ids(0, 8)
    assert built.sampling.targets.tolist() == ids(51, 8)
    assert built.sampling.num_logprobs == 1
    batch.starts, batch.counts, batch.num_logits = [8], [12], [12]
    batch.samples, batch.admitted = [True], []
    built = inputs.build(batch)
    assert built.sampling.targets.tolist() == [*ids(59, 11), -1]
    assert built.sampling.positions.tolist() == ids(9, 12)


def test_growth_and_copies_reach_the_step() -> None:
    sequence = make_sequence(make_request(ids(0, 17)), row=0, blocks=[1, 2])
    batch = ScheduledBatch(
        sequences=[sequence],
        rows=[0],
        starts=[16],
        counts=[1],
        num_logits=[1],
        samples=[True],
        admitted=[sequence],
        grown=[BlockGrowth(0, 2, 9), BlockGrowth(3, 0, 4)],
        copies=[BlockCopy(6, 2, 5), BlockCopy(8, 1, 16)],
    )
    step = make_inputs().build(batch).step
    assert step.copies.tolist() == [[6, 2, 5], [8, 1, 16]] and step.copies.dtype == np.int32
    assert step.block_tables[0, 0].tolist() == [1, 2, 9, 0]
    assert step.block_tables[0, 3, 0] == 4


def test_nothing_of_a_former_owner_remains_in_a_row() -> None:
    inputs = make_inputs()
    first = make_sequence(
        make_request([1, 2], temperature=0.3, top_k=4, logit_bias={5: 1.0}, logprobs=3),
        row=0,
        blocks=[1],
    )
    second = make_sequence(make_request([3, 4, 5]), row=0, blocks=[2])
    for sequence in (first, second):
        batch = ScheduledBatch(
            sequences=[sequence],
            rows=[0],
            starts=[0],
            counts=[sequence.num_tokens],
            num_logits=[1],
            samples=[True],
            admitted=[sequence],
        )
        built = inputs.build(batch)
    assert built.sampling.table["temperature"][0] == 1.0
    assert built.sampling.table["top_k"][0] == 0
    assert built.sampling.table["num_prompt_tokens"][0] == 3
    assert built.sampling.bias is None and built.sampling.num_logprobs == -1


def test_logprobs_are_wanted_only_when_someone_in_the_batch_wants_them() -> None:
    inputs = make_inputs()
    plain = make_sequence(make_request([1, 2]), row=0, blocks=[1])
    curious = make_sequence(make_request([3, 4], logprobs=4), row=1, blocks=[2])

    def build(*sequences: object) -> int:
        chosen = [s for s in (plain, curious) if s in sequences]
        batch = ScheduledBatch(
            sequences=chosen,
            rows=[s.row for s in chosen],
            starts=[0] * len(chosen),
            counts=[2] * len(chosen),
            num_logits=[1] * len(chosen),
            samples=[True] * len(chosen),
            admitted=chosen,
        )
        return inputs.build(batch).sampling.num_logprobs

    assert build(plain, curious) == 4
    assert build(plain) == -1
