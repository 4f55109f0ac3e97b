"""A step's bytes: what goes in comes out, and what is no plan is refused by name."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_engine.backends.backend import BackendLimits, BackendStep, StateStep
from octavo_engine.backends.step_plan import StepPlan, StepPlanError, max_plan_bytes
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray


def make_step(
    counts: list[int], lengths: list[int], *, seed: int = 0, num_groups: int = 1
) -> BackendStep:
    """Sequences in rows that are not theirs in order, over a table far wider than they need."""
    rng = np.random.default_rng(seed)
    num_seqs = len(counts)
    rows = rng.permutation(num_seqs + 3)[:num_seqs].astype(np.int32)
    tables = rng.integers(0, 1000, (num_groups, num_seqs + 3, 50), dtype=np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    positions = [np.arange(end - n, end) for n, end in zip(counts, lengths, strict=True)]
    flat = np.concatenate(positions).astype(np.int32)
    owners = np.repeat(rows, counts)
    return BackendStep(
        token_ids=rng.integers(0, 256, len(flat), dtype=np.int32),
        positions=flat,
        slots=tables[:, owners, flat // BLOCK_SIZE] * BLOCK_SIZE + flat % BLOCK_SIZE,
        seq_starts=starts,
        seq_lens=np.array(lengths, np.int32),
        rows=rows,
        block_tables=tables,
        logit_rows=starts[1:] - 1,
        copies=rng.integers(0, 99, (seed % 3, 3), dtype=np.int32),
        adapters=np.arange(num_seqs, dtype=np.int32) - 1 if num_groups > 1 else None,
        states=make_states(rng, rows, len(flat)) if num_groups > 1 else None,
    )


def make_states(rng: np.random.Generator, rows: NDArray[np.int32], num_tokens: int) -> StateStep:
    saves = rng.integers(-1, 9, num_tokens, dtype=np.int32)
    return StateStep(rows, saves, rng.integers(0, 9, (2, 2), dtype=np.int32))


STEP = make_step([1, 5, 20], [40, 5, 600], seed=2)


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        make_step([1], [1]),
        make_step([1] * 32, list(range(100, 132)), seed=1),
        make_step([1, 9], [70, 9], seed=4, num_groups=3),
    ],
    ids=["mixed", "one token", "decode", "groups and adapters"],
)
def test_what_goes_in_comes_out(step: BackendStep) -> None:
    plan = StepPlan.of(step)
    again = StepPlan.decode(plan.encode())
    for field in dataclasses.fields(StepPlan):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(plan, field.name))
    back = again.step()
    num_blocks = -(-int(step.seq_lens.max()) // BLOCK_SIZE)
    np.testing.assert_array_equal(
        back.block_tables[:, back.rows], step.block_tables[:, step.rows, :num_blocks]
    )
    np.testing.assert_array_equal(back.slots, step.slots)


def test_the_largest_step_has_room() -> None:
    limits = BackendLimits(max_tokens=96, max_seqs=3, max_logit_rows=8, max_model_len=600)
    counts = [32, 32, 32]
    for num_groups in (1, 4):
        step = make_step(counts, [600, 600, 600], seed=2, num_groups=num_groups)
        assert len(StepPlan.of(step).encode()) <= max_plan_bytes(limits, num_groups)


def test_a_plan_is_small() -> None:
    step = make_step([1] * 32, [400] * 32)
    assert len(StepPlan.of(step).encode()) < 32 * 4 * (25 + 8)


DATA = StepPlan.of(STEP).encode()


def with_word(place: int, value: int) -> bytes:
    return DATA[: 4 * place] + struct.pack("<I", value) + DATA[4 * place + 4 :]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "of 0 bytes is cut off"),
        (DATA[:-1], "is cut off"),
        (b"abcdefgh", "begins with"),
        (DATA[:-4], "copies of a step plan has the shape"),
        (DATA[:40], "the head of a step plan is cut off"),
        (DATA + b"\0\0\0\0", "4 bytes behind its arrays"),
        (with_word(1, 13), "has 13 arrays; 12 are known"),
        (with_word(1, 7), "bytes behind its arrays"),
        (with_word(2, 99), "has an array 99; 12 are known"),
        (with_word(3, 9), "token_ids of a step plan has 9 dimensions"),
        (with_word(4, 1 << 31), "token_ids of a step plan has the shape"),
        (with_word(5, 0), "has token_ids twice"),
        (struct.pack("<II", 0x4F535031, 0), "without token_ids"),
    ],
)
def test_what_is_no_plan_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(StepPlanError, match=message):
        StepPlan.decode(data)


def test_states_come_whole() -> None:
    step = make_step([1, 9], [70, 9], seed=4, num_groups=3)
    assert step.states is not None
    found = StepPlan.decode(StepPlan.of(step).encode()).step().states
    assert found is not None
    for given_array, read_array in zip(step.states, found, strict=True):
        np.testing.assert_array_equal(given_array, read_array)
    partial = dataclasses.replace(StepPlan.of(step), state_saves=None)
    with pytest.raises(StepPlanError, match="with some of state_slots, state_saves, state_copies"):
        StepPlan.decode(partial.encode())


def test_arrays_must_agree() -> None:
    plan = StepPlan.of(STEP)
    for name in ("positions", "seq_lens"):
        changed = dataclasses.replace(plan, **{name: getattr(plan, name)[:-1]})
        with pytest.raises(StepPlanError, match=f"{name} of a step plan has the shape"):
            StepPlan.decode(changed.encode())
    for name in ("slots", "block_tables"):
        changed = dataclasses.replace(plan, **{name: getattr(plan, name)[:, :-1]})
        with pytest.raises(StepPlanError, match=f"{name} of a step plan has the shape"):
            StepPlan.decode(changed.encode())


@given(
    place=st.integers(0, len(DATA) - 1),
    junk=st.binary(min_size=1, max_size=12),
    length=st.integers(0, len(DATA)),
)
def test_any_bytes_are_a_plan_or_an_error(place: int, junk: bytes, length: int) -> None:
    for data in (DATA[:place] + junk + DATA[place + len(junk) :], DATA[:length], junk):
        try:
            plan = StepPlan.decode(data)
        except StepPlanError:
            continue
        assert len(plan.seq_starts) == len(plan.seq_lens) + 1 == plan.block_tables.shape[1] + 1
        assert len(plan.token_ids) == len(plan.positions) == plan.slots.shape[1]
