"""Time that the host took: of what was asked for, and silence where nobody counts it."""

import pytest

from octavo.measure.steal_time import STAT, StealTime, describe

#                user nice system idle iowait irq softirq steal guest guest_nice
BEFORE = "cpu  100 10 50 1000 5 1 4 30 7 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
AFTER = "cpu  160 10 60 9000 99 1 9 55 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"


def test_a_share_is_of_what_was_asked_for(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    stolen = StealTime(stat)
    assert stolen.share() == 0.0  # nothing was asked for yet
    stat.write_text(AFTER)
    assert stolen.share() == pytest.approx(25 / 100)  # 60 user, 10 system, 5 softirq, 25 stolen


@pytest.mark.parametrize("text", ["", "cpu", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu a b c d"])
def test_a_system_that_does_not_count_says_nothing(tmp_path, text):
    stat = tmp_path / "stat"
    assert StealTime(stat).share() is None  # no such file
    stat.write_text(text)
    assert StealTime(stat).share() is None


def test_only_what_matters_is_told():
    assert describe(None) == describe(0.0) == describe(0.004) == ""
    assert "gave 12 % of" in describe(0.123)


@pytest.mark.skipif(not STAT.exists(), reason="needs Linux")
def test_this_machine_counts():
    share = StealTime().share()
    assert share is not None and 0 <= share <= 1
