"""A wall clock that was set is noticed; a drift, and a process that stood still, are not."""

from __future__ import annotations

import pytest

from octavo_common.clock_watch import SHOWN_S, ClockWatch


class Clocks:
    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1.7e9, 500.0
        self.stops_for_s = 0.0  # between the readings of a look

    def pass_(self, seconds: float, *, set_by: float = 0.0) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds + set_by

    def wall(self) -> float:
        wall_s = self.wall_s
        self.pass_(self.stops_for_s)
        return wall_s

    def monotonic(self) -> float:
        return self.monotonic_s


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def watch(clocks: Clocks) -> ClockWatch:
    watch = ClockWatch(clocks.wall, clocks.monotonic)
    assert watch.look() == 0.0
    return watch


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 2.5])
def test_a_jump_is_seen_at_the_next_look_once_and_shown_for_minutes(
    clocks: Clocks, watch: ClockWatch, jump_s: float
):
    clocks.pass_(1.0, set_by=jump_s)
    assert watch.look() == pytest.approx(jump_s)
    clocks.pass_(1.0)
    assert watch.look() == 0.0
    assert watch.num_jumps == 1 and watch.recent_s == pytest.approx(jump_s)
    clocks.pass_(SHOWN_S + 1)
    assert (watch.num_jumps, watch.recent_s) == (1, 0.0)


def test_a_drifting_clock_and_a_pause_are_no_jumps(clocks: Clocks, watch: ClockWatch):
    for _ in range(1000):
        clocks.pass_(1.0, set_by=5e-4)  # as much as a clock is slewed by
        assert watch.look() == 0.0
    clocks.pass_(60.0)
    assert watch.look() == 0.0
    assert (watch.num_jumps, watch.recent_s) == (0, 0.0)


def test_a_look_that_was_interrupted_says_nothing(clocks: Clocks, watch: ClockWatch):
    clocks.stops_for_s = 30.0
    assert watch.look() == 0.0
    clocks.stops_for_s = 0.0
    assert watch.look() == 0.0
    clocks.pass_(1.0, set_by=100.0)
    assert watch.look() == pytest.approx(100.0)
