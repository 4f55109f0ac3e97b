"""The order of a run: each worker's part begins with whole groups, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


LEAVES = """
import signal
from tests.conftest import _signals_stay

def test_leaves_it(): signal.signal(signal.SIGINT, lambda *_: None)
def test_finds_it_as_it_was(): assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_who_leaves_a_signal_changed_is_named_and_the_next_one_finds_it_as_it_was(tmp_path):
    (tmp_path / "test_signals.py").write_text(LEAVES)
    command = (
        "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, "-p", "no:cacheprovider", "-q", str(tmp_path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False,
    )  # fmt: skip
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "AssertionError: the test leaves a signal's handler changed" in done.stdout
    assert "::test_leaves_it" in done.stdout.rpartition("ERROR")[2]
