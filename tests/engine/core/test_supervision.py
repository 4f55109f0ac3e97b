"""Judgements on a core's pulse, on a clock that the test moves."""

from octavo_engine.core.heartbeat import Heartbeat, Pulse
from octavo_engine.core.supervision import Restarts, Timing, Watch
from tests.fakes.clock import ManualClock

TIMING = Timing()
BUSY = Pulse(steps=4, step_age_s=0.1, expected_s=0.1)


def test_silence_is_a_stall_only_beyond_patience():
    watch = Watch(TIMING)
    watch.pinged(10.0)
    watch.pinged(11.0)  # the oldest unanswered one counts
    assert watch.stall(13.0, loading=False) == ""
    assert watch.stall(13.1, loading=False) == "the engine core has not answered for 3.1 s"
    assert watch.stall(13.1, loading=True) == ""
    watch.ponged(BUSY)
    assert watch.stall(13.2, loading=False) == ""


def test_a_step_is_stuck_only_far_beyond_its_own_estimate():
    watch = Watch(TIMING)
    for age, expected, stuck in ((2.9, 0.0, False), (3.1, 0.0, True), (5.0, 0.6, False)):
        watch.ponged(Pulse(1, age, expected))
        assert bool(watch.stall(0.0, loading=False)) == stuck
    watch.ponged(Pulse(1, 7.0, 0.6))
    assert watch.stall(0.0, loading=False) == "the engine core is stuck in a step for 7.0 s"


def test_a_core_is_killed_only_after_a_stall_without_a_break():
    watch = Watch(TIMING)
    assert not watch.must_be_killed(0.0, "stuck")
    assert not watch.must_be_killed(9.9, "stuck")
    assert not watch.must_be_killed(9.95, "")
    assert not watch.must_be_killed(10.1, "stuck")
    assert watch.must_be_killed(20.1, "stuck")


def test_after_a_sleep_of_our_own_silence_proves_nothing():
    watch = Watch(TIMING)
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
    assert heartbeat.pulse() == Pulse(0, 0.0, 0.0)
    heartbeat.begin()
    heartbeat.expect(10)
    clock.advance(2.0)
    assert heartbeat.pulse() == Pulse(0, 2.0, 0.0)  # nothing is known of its pace yet
    heartbeat.learn(10, 2.0)
    heartbeat.end()
    assert heartbeat.pulse() == Pulse(1, 0.0, 0.0)
    heartbeat.begin()
    heartbeat.expect(100)
    assert heartbeat.pulse().expected_s == 20.0


def test_a_long_prompt_after_quick_steps_is_no_hang():
    heartbeat = Heartbeat(ManualClock())
    heartbeat.learn(16, 1.6)
    for _ in range(50):
        heartbeat.learn(64, 0.001)
    heartbeat.begin()
    heartbeat.expect(2048)
    assert heartbeat.pulse().expected_s > 100.0
