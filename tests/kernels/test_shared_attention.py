"""Sequences that hold blocks in common attend to them together, with the bits of each alone.

Red when: a row of a shared tile has another's query, position or state; a partition that a row sees
only in part is shared; states are merged in another order than that of one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels.harness import ISAS, AttentionCase, PagedAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = np.ndarray[tuple[int, int], np.dtype[np.float32]]

# A tree: 1 to 4 begin with 1,030 tokens of 0 or fewer; 5 with what 4 made of it; 7 is of its own.
PREFIXES = {1: (0, 1024), 2: (0, 1024), 3: (0, 1040), 4: (0, 512), 5: (4, 1328), 6: (0, 496)}
LENGTHS = [1044, 1060, 1041, 1080, 1340, 1345, 520, 530]
EVERY = range(len(LENGTHS))
OF_EACH_KIND = (2, 4, 7)  # of a prefix, of which another is the prefix, of its own
CASES = {
    "grouped": AttentionCase(num_heads=4, num_kv_heads=2),
    "groups_of_three": AttentionCase(num_heads=9, num_kv_heads=3, head_dim=64),
    "multi_query": AttentionCase(num_heads=7, num_kv_heads=1, head_dim=16, rotary_dim=16),
    "large_group": AttentionCase(num_heads=50, num_kv_heads=1, head_dim=16, rotary_dim=16),
    "multi_head": AttentionCase(num_heads=3, num_kv_heads=3),
    "soft_cap": AttentionCase(num_heads=4, num_kv_heads=2, soft_cap=1.5, scale=1.0),
    "window": AttentionCase(num_heads=4, num_kv_heads=2, window=700),
}
# The best alone is quick: the portable one is compiled without much effort in a checkout, so it
# computes fewer sequences alone.
SETS = [pytest.param(isa, marks=[pytest.mark.slow] * (isa != ISAS[0])) for isa in ISAS]


def make_rows(case: AttentionCase) -> list[Floats]:
    """Of the sequences, those of a prefix being the same as the other's."""
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((n, case.qkv_cols)).astype(np.float32) for n in LENGTHS]
    for seq, (other, length) in PREFIXES.items():
        rows[seq][:length] = rows[other][:length]
    return rows


def alone(case: AttentionCase, rows: Floats, isa: str) -> Floats:
    run = PagedAttention(case, [rows], _native.Team(1, isa))
    run.step([(0, len(rows))])
    return run.outputs[0]


def compute_together(run: PagedAttention, seed: int) -> None:
    """The prompts one by one, then all others in steps of one to four tokens of some of them."""
    for seq, last in ((0, 1040), (4, 1328)):
        run.step([(seq, last - run.lengths[seq])])
    rng = np.random.default_rng(seed)
    while left := [i for i, n in enumerate(LENGTHS) if run.lengths[i] < n]:
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
        run.step(
            [(int(i), min(int(rng.integers(1, 5)), LENGTHS[i] - run.lengths[i])) for i in chosen]
        )


def check(
    case: AttentionCase, isa: str, threads: int, seed: int = 0, sequences: Sequence[int] = EVERY
) -> None:
    """Of `sequences`, which are computed alone, too: that takes most of the time."""
    rows = make_rows(case)
    run = PagedAttention(case, rows, _native.Team(threads, isa), seed=seed, prefixes=PREFIXES)
    compute_together(run, seed)
    for seq in sequences:
        got = run.outputs[seq]
        expected = alone(case, rows[seq], isa)[len(rows[seq]) - len(got) :]
        assert len(got) >= 1
        assert got.tobytes() == expected.tobytes(), seq


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_what_others_hold(isa: str, name: str) -> None:
    check(CASES[name], isa, threads=2, sequences=EVERY if isa == ISAS[0] else OF_EACH_KIND)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_in_every_format(kv_dtype: str, threads: int) -> None:
    check(AttentionCase(kv_dtype=kv_dtype), "", threads, seed=threads)


def test_more_rows_than_one_tile_holds() -> None:
    case = AttentionCase(num_heads=8, num_kv_heads=2, kv_dtype="bf16")
    rng = np.random.default_rng(5)
    prompt = rng.standard_normal((1040, case.qkv_cols)).astype(np.float32)
    ends = [rng.standard_normal((6, case.qkv_cols)).astype(np.float32) for _ in range(40)]
    rows = [prompt, *(np.concatenate([prompt[:1024], end]) for end in ends)]
    run = PagedAttention(
        case, rows, _native.Team(2), prefixes=dict.fromkeys(range(1, len(rows)), (0, 1024))
    )
    run.step([(0, 1040)])
    for _ in range(6):
        run.step([(i, 1) for i in range(1, len(rows))])
    for seq in range(1, len(rows)):
        assert run.outputs[seq].tobytes() == alone(case, rows[seq], "")[1024:].tobytes(), seq


def test_a_partition_that_is_seen_in_part_is_not_shared() -> None:
    case = AttentionCase(num_heads=4, num_kv_heads=2)
    (rows,) = make_rows(case)[4:5]
    shared = 1328 // 16 * 16
    run = PagedAttention(
        case, [rows] * 4, _native.Team(2), prefixes=dict.fromkeys((1, 2, 3), (0, shared))
    )
    run.step([(0, shared)])
    run.lengths[1:] = [700, 740, 1100]  # of tokens that are there, computed once more
    for _ in range(3):
        run.step([(1, 2), (2, 1), (3, 1)])
    expected = alone(case, rows, "")
    for seq, begin in ((1, 700), (2, 740), (3, 1100)):
        got = run.outputs[seq]
        assert got.tobytes() == expected[begin : begin + len(got)].tobytes(), seq
