"""Which expert lies in which slot: every expert has one, and no rank has much more to do."""

from __future__ import annotations

import random

import pytest

from octavo_engine.backends.native.expert_balance import (
    LEAST_GAIN,
    balance,
    first_slots,
    rank_loads,
    slot_ranges,
)


def spread_of(rows: list[int], slots: list[int], size: int) -> float:
    """The busiest rank's rows, times those of all ranks on average."""
    loads = rank_loads(rows, slots, size)
    return max(loads) * size / sum(loads)


def test_slots_at_the_start() -> None:
    assert first_slots(4, 4) == [0, 1, 2, 3]
    assert first_slots(6, 4) == [0, 1, 2, 3, 0, 1]


def test_a_rank_has_its_experts_rows_and_its_share_of_those_held_twice() -> None:
    assert rank_loads([6, 2, 1, 0], [0, 1, 2, 3, 0, 0], 2) == [2 + 2 + 1, 0 + 2 + 2]


def test_the_busiest_experts_part() -> None:
    rows = [100, 100, 1, 1]
    slots = balance(rows, [0, 1, 2, 3], 2)
    assert rank_loads(rows, slots, 2) == [101, 101]


def test_one_expert_that_has_nearly_all_is_held_by_all_ranks() -> None:
    rows = [1000, 1, 1, 1]
    slots = balance(rows, first_slots(8, 4), 4)
    assert all(0 in slots[own.start : own.stop] for own in slot_ranges(8, 4))
    assert spread_of(rows, slots, 4) < 1.01


def test_experts_stay_where_ranks_are_even() -> None:
    slots = [3, 0, 1, 2]
    assert balance([50, 51, 49, 50], slots, 2) == slots


def test_experts_stay_where_nothing_was_computed() -> None:
    assert balance([0, 0, 0, 0], [3, 0, 1, 2], 2) == [3, 0, 1, 2]


def test_few_experts_move() -> None:
    rows = [10] * 32
    rows[0] = rows[1] = 100
    moved = sum(e != s for s, e in enumerate(balance(rows, first_slots(32, 32), 4)))
    assert 2 <= moved <= 12


@pytest.mark.parametrize("seed", range(60))
def test_random_rows(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(2, 6)
    num_experts = chance.randint(size, 40)
    extra = chance.randint(0, num_experts * (size - 1)) if seed % 2 else 0
    slots = first_slots(num_experts + extra, num_experts)
    for _ in range(4):  # the next windows, from where the last one led
        rows = [int(chance.paretovariate(0.8)) for _ in range(num_experts)]
        after = balance(rows, slots, size)
        assert after == balance(list(rows), list(slots), size), "all ranks must come to the same"
        assert set(after) == set(range(num_experts))
        assert len(after) == len(slots)
        before, now = (max(rank_loads(rows, each, size)) for each in (slots, after))
        assert after == slots or now <= (1 - LEAST_GAIN) * before
        slots = after


def test_skewed_experts_of_a_large_layer_end_up_even() -> None:
    """A hundred and twenty-eight experts by Zipf: what no placement can divide is the largest."""
    chance = random.Random(5)
    rows = [int(100_000 / (rank + 1)) for rank in range(128)]
    chance.shuffle(rows)
    slots = first_slots(128, 128)
    assert spread_of(rows, slots, 4) > 1.15
    assert spread_of(rows, balance(rows, slots, 4), 4) < 1.02
    wide = first_slots(128 + 32, 128)
    assert spread_of(rows, balance(rows, wide, 8), 8) < 1.05
