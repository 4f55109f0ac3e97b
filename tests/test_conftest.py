"""The order of a run: each worker's part begins with whole groups, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.conftest import queues


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_no_group_is_cut_where_xdist_cuts(workers):
    groups = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"], ["d1", "d2"]]
    others = [str(number) for number in range(33)]
    ordered = queues(groups, others, workers)

    assert sorted(ordered) == sorted([*others, *(name for group in groups for name in group)])
    assert [name for name in ordered if name.isdigit()] == others
    left, heads = ordered, []
    for number in range(workers):
        part, left = (lambda n: (left[:n], left[n:]))(len(left) // (workers - number))
        grouped = [name for name in part if not name.isdigit()]
        assert part[: len(grouped)] == grouped  # at its beginning, one group after the other
        heads.append("".join(grouped))
    assert "".join(sorted(heads)).replace("d1d2", "").count("a1a2a3") == 1
    assert all("".join(group) in "|".join(heads) for group in groups)


def test_groups_larger_than_a_part_lose_nothing():
    assert queues([["a", "b", "c"]], ["1"], 4) == ["a", "b", "c", "1"]
