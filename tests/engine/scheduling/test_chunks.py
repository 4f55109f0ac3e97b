"""How sequences that have to catch up share the tokens of a step."""

from __future__ import annotations

import random

import pytest

from octavo_engine.scheduling.chunks import demand, share_budget


@pytest.mark.parametrize(
    ("needs", "budget", "shares"),
    [
        ([], 10, []),
        ([5], 10, [5]),
        ([50], 10, [10]),
        ([50, 3], 10, [7, 3]),  # the oldest has half and what the short one leaves
        ([50, 50], 10, [9, 1]),  # one each, and equals in turn
        ([50, 4, 4], 10, [5, 4, 1]),
        ([3, 50, 3], 10, [3, 4, 3]),
        ([4, 4, 4], 12, [4, 4, 4]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([9], 0, [0]),
    ],
)
def test_a_step_is_shared(needs, budget, shares):
    assert share_budget(needs, budget) == shares


def test_sharing_uses_the_whole_budget_and_always_advances_the_oldest():
    rng = random.Random(3)
    for _ in range(2000):
        needs = [rng.choice([1, 3, 20, 500]) for _ in range(rng.randint(1, 9))]
        budget = rng.randint(1, 300)
        shares = share_budget(needs, budget)
        assert sum(shares) == min(sum(needs), budget)
        assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
        assert shares[0] >= min(needs[0], (budget - len(needs)) // 2)
        assert sum(share > 0 for share in shares) >= min(len(needs), budget)


def test_long_prompts_claim_half_a_step_between_them():
    assert demand([], 100) == 0
    assert demand([1000], 100) == 50
    assert demand([1000, 1000], 100) == 50
    assert demand([1000, 50, 20], 100) == 120
