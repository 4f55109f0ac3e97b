"""Judgements on a core's pulse, on a clock that the test moves."""

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.core.process.heartbeat import COMPILE_S, Heartbeat, HeartbeatState
from octavo_engine.core.process.supervision import HangDetector, Restarts, Timing
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.outputs import StepResult
from tests.fakes.clock import ManualClock
from tests.fakes.requests import make_prompt, make_request

TIMING = Timing()
BUSY = HeartbeatState(steps=4, step_age_s=0.1, expected_s=0.1)


def test_silence_is_a_stall_only_beyond_patience():
    watch = HangDetector(TIMING)
    watch.pinged(10.0)
    watch.pinged(11.0)  # the oldest unanswered one counts
    assert watch.stall(13.0, loading=False) == ""
    assert watch.stall(13.1, loading=False) == "the engine core has not answered for 3.1 s"
    assert watch.stall(13.1, loading=True) == ""
    watch.ponged(BUSY)
    assert watch.stall(13.2, loading=False) == ""


def test_a_step_is_stuck_only_far_beyond_its_own_estimate():
    watch = HangDetector(TIMING)
    for age, expected, stuck in ((2.9, 0.0, False), (3.1, 0.0, True), (6.0, 1.6, False)):
        watch.ponged(HeartbeatState(1, age, expected))
        assert bool(watch.stall(0.0, loading=False)) == stuck
    watch.ponged(HeartbeatState(1, 7.0, 1.6))
    assert watch.stall(0.0, loading=False) == "the engine core is stuck in a step for 7.0 s"


def test_a_core_is_killed_only_after_a_stall_without_a_break():
    watch = HangDetector(TIMING)
    assert not watch.must_be_killed(0.0, "stuck")
    assert not watch.must_be_killed(9.9, "stuck")
    assert not watch.must_be_killed(9.95, "")
    assert not watch.must_be_killed(10.1, "stuck")
    assert watch.must_be_killed(20.1, "stuck")


def test_after_a_sleep_of_our_own_silence_proves_nothing():
    watch = HangDetector(TIMING)
    watch.pinged(0.0)
    watch.must_be_killed(3.5, "silent")
    watch.forgive(60.0)
    assert watch.stall(60.5, loading=False) == ""
    assert not watch.must_be_killed(60.5, "silent")


def test_restarts_back_off_and_end():
    restarts = Restarts(TIMING)
    assert [restarts.failed(1.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_a_core_that_lived_long_starts_the_count_anew():
    restarts = Restarts(TIMING)
    restarts.failed(1.0)
    restarts.failed(1.0)
    assert restarts.failed(3600.0) == 1.0


def test_the_loop_tells_its_step_and_what_it_should_take():
    clock = ManualClock()
    heartbeat = Heartbeat(clock)
    assert heartbeat.pulse() == HeartbeatState(0, 0.0, 0.0)
    heartbeat.begin()
    heartbeat.expect(0.5)
    clock.advance(2.0)
    assert heartbeat.pulse() == HeartbeatState(0, 2.0, 0.5)
    heartbeat.end()
    assert heartbeat.pulse() == HeartbeatState(1, 0.0, 0.0, slowest_s=2.0)


def test_what_is_compiled_during_a_step_is_no_missing_progress():
    clock = ManualClock()
    heartbeat = Heartbeat(clock)
    heartbeat.begin()
    heartbeat.expect(0.1)
    clock.advance(0.5)
    for _ in range(2):  # two kernels, one after the other
        heartbeat.compile_begins()
        clock.advance(40.0)
        assert heartbeat.pulse().step_age_s == pytest.approx(0.5)
        heartbeat.expect(0.1)
        heartbeat.compile_ends()
    clock.advance(3.0)
    assert heartbeat.pulse().is_stalled(TIMING.patience)  # now it hangs
    heartbeat.end()
    assert heartbeat.pulse().slowest_s == pytest.approx(3.5)  # and is no excuse later


def test_a_compilation_that_never_ends_is_a_hang():
    clock = ManualClock()
    heartbeat = Heartbeat(clock)
    heartbeat.compile_begins()  # nothing is under way: a warm-up
    heartbeat.begin()
    heartbeat.compile_begins()
    clock.advance(COMPILE_S)
    assert not heartbeat.pulse().is_stalled(TIMING.patience)
    clock.advance(3.5)
    assert heartbeat.pulse().is_stalled(TIMING.patience)
    heartbeat.begin()  # a compilation that failed says nothing when it ends
    clock.advance(3.5)
    assert heartbeat.pulse().is_stalled(TIMING.patience)


def test_a_core_whose_steps_take_long_is_given_up_later():
    for pulse, at in (
        (HeartbeatState(9, 5.0, 0.5), 25.0),
        (HeartbeatState(9, 5.0, 0.1, slowest_s=20.0), 50.0),
    ):
        watch = HangDetector(TIMING)
        watch.ponged(pulse)
        assert watch.stall(0.0, loading=False)
        assert not watch.must_be_killed(0.0, "stuck")
        assert not watch.must_be_killed(at - 0.1, "stuck")
        assert watch.must_be_killed(at, "stuck")


@pytest.mark.parametrize("num_tokens", [16, 2000])
def test_however_long_the_warm_up_took_a_hang_is_seen_in_five_seconds(num_tokens):
    """One slow token must not make a step of thousands look as if it could take minutes."""
    clock = ManualClock()
    scheduler = Scheduler(SchedulerConfig(), num_blocks=400, now=clock)

    def step(step_s: float) -> float:
        batch = scheduler.schedule()
        expected_s = scheduler.expected_s(batch)
        clock.advance(step_s)
        scheduler.update(batch, StepResult([1] * len(batch.sequences)), step_s)
        return expected_s

    scheduler.add(make_request(16, max_tokens=300))
    step(1.6)
    for _ in range(200):
        step(0.01)
    for number in range(20):
        scheduler.add(make_request(make_prompt(16, first=30 + number), max_tokens=1))
        step(0.02)
    scheduler.add(make_request(make_prompt(num_tokens, first=9), max_tokens=1))
    pulse = HeartbeatState(1, 0.0, step(0.1))
    assert 0.0 < pulse.expected_s < 1.0
    assert pulse._replace(step_age_s=3.5).is_stalled(TIMING.patience)
