"""A grammar's mask in the sampler: the kernel and its slow twin agree, and nothing else gets by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine import _native
from octavo_engine.sampling.batch import (
    SAMPLED_NOTHING_ALLOWED,
    SAMPLED_OK,
    MaskRows,
    Ragged,
    SamplingBatch,
)
from octavo_engine.sampling.rows import new_table
from octavo_engine.sampling.sampler import sample
from tests.kernels import sampling_reference as reference

TEAM = _native.Team(2)


class Masks:
    def __init__(self, rows: list[int], masks: list[list[int]], width: int) -> None:
        bits = np.zeros((len(masks), width * 32), np.uint8)
        for mask, ids in zip(bits, masks, strict=True):
            mask[ids] = 1
        packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        self._rows = MaskRows(np.array(rows, np.int32), packed)

    def take(self) -> MaskRows:
        return self._rows


def make_batch(num_rows: int, masks: Masks | None, **fields: Any) -> SamplingBatch:
    table = new_table(num_rows)
    for name, value in fields.items():
        table[name] = value
    return SamplingBatch(
        table=table,
        rows=np.arange(num_rows, dtype=np.int32),
        positions=np.full(num_rows, 4, np.int32),
        targets=np.full(num_rows, -1, np.int32),
        history=np.tile(np.arange(4, dtype=np.int32), (num_rows, 1)),
        masks=masks,
    )


def make_logits(num_rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, vocab)).astype(np.float32) * 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 257, 1000])
def test_only_allowed_tokens_come_and_the_best_of_them(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = make_logits(4, vocab)
    allowed = [sorted(rng.choice(vocab, size=rng.integers(1, vocab + 1), replace=False).tolist())
               for _ in range(3)]  # fmt: skip
    batch = make_batch(4, Masks([0, -1, 2, 1], allowed, -(-vocab // 32)), temperature=0.0)
    tokens = sample(TEAM, logits.copy(), batch).tokens.tolist()
    for row, mask in enumerate([allowed[0], list(range(vocab)), allowed[2], allowed[1]]):
        assert tokens[row] == mask[int(np.argmax(logits[row][mask]))]


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = np.arange(100, dtype=np.float32)[None].copy()
    batch = make_batch(1, Masks([0], [[3, 60]], 2), temperature=0.0)
    assert sample(TEAM, logits, batch).tokens.tolist() == [60]


def test_a_mask_wider_than_the_vocabulary_reaches_no_further() -> None:
    logits = np.zeros((2, 40), np.float32)
    batch = make_batch(2, Masks([0, 0], [[39, 40, 63, 90]], 3), temperature=0.0)
    assert sample(TEAM, logits, batch).tokens.tolist() == [39, 39]


def test_nothing_allowed_fails_that_row_alone() -> None:
    logits = make_logits(3, 64)
    batch = make_batch(3, Masks([0, 1, -1], [[], [5]], 2), temperature=1.0)
    sampled = sample(TEAM, logits, batch)
    assert sampled.status.tolist() == [SAMPLED_NOTHING_ALLOWED, SAMPLED_OK, SAMPLED_OK]
    assert sampled.tokens[0] == -1 and sampled.tokens[1] == 5


def test_log_probabilities_are_of_the_raw_logits() -> None:
    logits = make_logits(1, 70)
    plain = make_batch(1, None, temperature=0.0)
    plain.targets = np.array([9], np.int32)
    plain.num_logprobs = 3
    masked = make_batch(1, Masks([0], [[9]], 3), temperature=0.0)
    masked.num_logprobs = 3
    a, b = sample(TEAM, logits.copy(), plain), sample(TEAM, logits.copy(), masked)
    assert a.tokens.tolist() == b.tokens.tolist() == [9]
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert (getattr(a, name) == getattr(b, name)).all(), name


def test_what_is_no_mask_is_refused() -> None:
    masks = Masks([1], [[1]], 1)
    with pytest.raises(ValueError, match="mask_rows: 1 is not a mask"):
        sample(TEAM, make_logits(1, 8), make_batch(1, masks))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernel_and_definition_agree(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 140))
    num_rows = data.draw(st.integers(1, 4))
    ids = st.lists(st.integers(0, vocab - 1), max_size=vocab)
    masks = data.draw(st.lists(ids, min_size=1, max_size=3))
    rows = data.draw(
        st.lists(st.integers(-1, len(masks) - 1), min_size=num_rows, max_size=num_rows)
    )
    batch = make_batch(
        num_rows,
        Masks(rows, masks, data.draw(st.integers(1, 6)) if vocab < 32 else -(-vocab // 32)),
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_p=data.draw(st.sampled_from([0.5, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        seed=data.draw(st.integers(0, 2**63)),
    )
    if data.draw(st.booleans()):
        allowed = np.array(sorted(set(data.draw(ids)) | {0}), np.int32)
        starts = np.minimum(np.arange(num_rows + 1), 1).astype(np.int32) * len(allowed)
        batch.allowed = Ragged(starts, allowed)
        values = np.full(len(allowed), -1.5, np.float32)
        batch.bias = Ragged(starts, allowed, values)
    logits = make_logits(num_rows, vocab, data.draw(st.integers(0, 99)))
    fast = sample(TEAM, logits.copy(), batch)
    slow = reference.sample(logits.copy(), batch)
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert fast.status.tolist() == slow.status.tolist()
