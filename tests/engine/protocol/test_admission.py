"""The measurements by which a queue decides whom it lets in."""

from __future__ import annotations

import math

import pytest

from octavo_engine.protocol.admission import ClientPatience, Forecast, QueueRate, ServiceTime


def moving(rate: float, seconds: float, *, burst: int = 1, start: float = 0.0) -> QueueRate:
    """A queue that somebody always waits in, and that `burst` leave at once."""
    queue = QueueRate()
    run_on(queue, rate, seconds, burst=burst, start=start)
    return queue


def run_on(
    queue: QueueRate, rate: float, seconds: float, *, burst: int = 1, start: float = 0.0
) -> float:
    now = start
    queue.waits(now, is_waiting=True)
    while now < start + seconds:
        now += burst / rate
        for _ in range(burst):
            queue.took(1.0, now)
    return now


@pytest.mark.parametrize("burst", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.1, 4.0, 500.0])
def test_the_rate_is_that_at_which_the_queue_moves(rate, burst):
    queue = moving(rate, 40 * burst / rate, burst=burst)
    now = math.ceil(40 * burst / rate * rate / burst) * burst / rate
    assert queue.wait_s(10.0, now) == pytest.approx(10.0 / rate, rel=0.1)


def test_nothing_is_foreseen_before_anything_was_seen():
    queue = QueueRate()
    assert queue.wait_s(1000.0, 5.0) == 0.0
    queue.waits(5.0, is_waiting=True)
    assert queue.wait_s(1000.0, 500.0) == 0.0
    queue.took(1.0, 6.0)
    assert queue.wait_s(1000.0, 6.0) == 0.0


def test_idle_time_does_not_change_the_rate():
    queue = moving(10.0, 20.0)
    queue.waits(20.0, is_waiting=False)
    queue.took(1.0, 500.0)  # it went past an empty queue
    assert queue.wait_s(10.0, 1000.0) == pytest.approx(1.0, rel=0.1)


def test_silence_makes_waits_longer_and_is_soon_forgotten():
    queue = moving(10.0, 20.0)
    assert queue.wait_s(10.0, 80.0) > 3.0  # nobody has left it for a minute
    now = run_on(queue, 10.0, 1.0, start=80.0)
    assert queue.wait_s(10.0, now) < 1.5


def test_the_rate_follows_engines_that_come_and_go():
    queue = moving(10.0, 30.0)
    now = run_on(queue, 40.0, 30.0, start=30.0)
    assert queue.wait_s(40.0, now) == pytest.approx(1.0, rel=0.3)


def test_service_takes_what_answers_took_at_the_least():
    service = ServiceTime()
    assert service.least_s(100) == 0.0
    for _ in range(20):
        service.observe(2.0, tokens=100, max_tokens=100)
    assert service.least_s(100) == pytest.approx(2.0)
    assert service.least_s(10) == pytest.approx(0.2)
    assert service.usual_tokens(50) == pytest.approx(50.0)


def test_answers_that_differ_much_are_foreseen_as_short():
    """Else a request with a large limit and a short answer would be refused for nothing."""
    service = ServiceTime()
    for count in range(100):
        service.observe(0.02 * (1 + 9 * (count % 10)), tokens=1 + 9 * (count % 10), max_tokens=1000)
    assert service.least_s(1000) < 0.2


def test_patience_is_that_of_most_clients_that_left():
    patience = ClientPatience()
    for second in range(20):
        for _ in range(3):
            patience.note(1.0, float(second), has_left=False)
            patience.note(5.0, float(second), has_left=True)
    assert 4.0 < patience.seconds(20.0) <= 5.0


def test_a_few_that_leave_do_not_make_the_others_impatient():
    patience = ClientPatience()
    for _ in range(100):
        patience.note(20.0, 1.0, has_left=False)
    for _ in range(10):
        patience.note(3.0, 1.0, has_left=True)
    assert patience.seconds(1.0) == math.inf


def test_patience_is_forgotten_with_the_clients_that_had_none():
    patience = ClientPatience()
    for _ in range(50):
        patience.note(5.0, 1.0, has_left=True)
    assert patience.seconds(2.0) < 5.0
    assert patience.seconds(600.0) == math.inf


def known(*, rate: float = 10.0, service_s: float = 1.0) -> Forecast:
    forecast = Forecast()
    forecast.rate = moving(rate, 30.0)
    for _ in range(20):
        forecast.service.observe(service_s, tokens=50, max_tokens=50)
    return forecast


@pytest.mark.parametrize(
    ("ahead", "time_left_s", "is_refused"),
    [(10, 5.0, False), (18, 5.0, False), (25, 5.0, True), (10, 2.0, True), (400, 600.0, True)],
)
def test_a_request_is_refused_that_would_be_done_too_late(ahead, time_left_s, is_refused):
    shortfall_s = known().shortfall_s(
        30.0, work_ahead=float(ahead), max_wait_s=30.0, time_left_s=time_left_s, max_tokens=50
    )
    assert (shortfall_s > 0.0) is is_refused


def test_a_queue_is_no_longer_than_half_of_what_clients_wait():
    forecast = known()
    for _ in range(50):
        forecast.patience.note(6.0, 30.0, has_left=True)
    wait_s = forecast.longest_wait_s(30.0)
    assert 2.0 < wait_s <= 3.0
    for factor, is_refused in ((0.9, False), (1.2, True)):
        ahead = factor * wait_s * 10.0
        shortfall_s = forecast.shortfall_s(30.0, work_ahead=ahead, max_wait_s=30.0)
        assert (shortfall_s > 0.0) is is_refused
    assert not forecast.is_overdue(30.0, since=30.0 - wait_s)
    assert forecast.is_overdue(30.0, since=25.0)


def test_at_its_turn_only_service_counts():
    forecast = known(service_s=2.0)
    assert not forecast.is_late(30.0, deadline=32.5, max_tokens=50)
    assert forecast.is_late(30.0, deadline=31.5, max_tokens=50)
    assert not forecast.is_late(30.0, deadline=31.5, max_tokens=20)
