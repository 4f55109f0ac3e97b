"""The rate at which weights come in: lately, not since the beginning."""

from __future__ import annotations

from octavo_engine.core.load_meter import LoadMeter
from octavo_engine.protocol.loading import LoadProgress
from tests.fakes.clock import ManualClock


def test_no_rate_is_reported_before_any_bytes_came():
    assert LoadMeter("fetching", ManualClock()).read() is None


def test_the_rate_is_that_of_the_last_seconds():
    clock = ManualClock()
    meter = LoadMeter("loading", clock)
    done = 0
    for _ in range(100):  # ten seconds at 1000 bytes a second
        meter.note(done, 50_000)
        clock.advance(0.1)
        done += 100
    for _ in range(120):  # twelve at 100
        meter.note(done, 50_000)
        clock.advance(0.1)
        done += 10
    reported = meter.read()
    assert reported is not None
    assert (reported.phase, reported.bytes_total) == ("loading", 50_000)
    assert 95 <= reported.bytes_per_s <= 105


def test_what_was_there_before_is_no_speed():
    clock = ManualClock()
    meter = LoadMeter("fetching", clock)
    meter.note(10**9, 2 * 10**9)
    clock.advance(1.0)
    meter.note(10**9 + 500, 2 * 10**9)
    assert meter.read() == LoadProgress("fetching", 10**9 + 500, 2 * 10**9, 500)


def test_half_a_moment_has_no_rate():
    clock = ManualClock()
    meter = LoadMeter("loading", clock)
    meter.note(0, 100)
    clock.advance(0.01)
    meter.note(50, 100)
    assert meter.read() == LoadProgress("loading", 50, 100)


def test_a_second_file_begins_anew():
    clock = ManualClock()
    meter = LoadMeter("fetching", clock)
    meter.note(0, 100)
    clock.advance(1.0)
    meter.note(100, 100)
    clock.advance(1.0)
    meter.note(10, 1000)
    assert meter.read() == LoadProgress("fetching", 10, 1000)
