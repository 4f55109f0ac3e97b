"""Budgets: repeats stay a share of the work, of the whole and of each tenant."""

from random import Random

import pytest

from octavo_router.config.settings import RetryConfig
from octavo_router.flow.budget import MAX_TENANTS, Losses, RetryBudget, Throttle, Windowed
from octavo_router.routing.outcome import AttemptResult
from tests.fakes.clock import ManualClock


def budget_with(num_active, **fields):
    clock = ManualClock()
    budget = RetryBudget(RetryConfig(**fields), clock)
    for number in range(num_active):
        budget.begin(f"tenant-{number}")
    return budget, clock


def test_a_fifth_of_what_is_active_may_be_repeats():
    budget, _ = budget_with(100)
    answers = [budget.take(f"tenant-{number}") for number in range(25)]
    assert answers == [""] * 20 + ["budget"] * 5


def test_a_few_are_always_allowed():
    budget, _ = budget_with(1)
    assert [budget.take(f"t{n}") for n in range(4)] == ["", "", "", "budget"]


def test_what_ended_is_given_back():
    budget, _ = budget_with(3)
    for _ in range(3):
        assert budget.take("tenant-0") == ""
    assert budget.take("tenant-1") == "budget"
    budget.end(num_repeats=3)
    assert budget.num_repeating == 0
    assert budget.num_active == 2
    assert budget.take("tenant-1") == ""


def test_one_tenant_has_a_tenth_of_its_own_requests():
    budget, clock = budget_with(0)
    for _ in range(1000):
        budget.begin("loud")
    granted = 0
    for _ in range(300):
        if budget.take("loud") == "":
            granted += 1
    assert granted == 100
    assert budget.take("loud") == "client_budget"
    assert budget.take("quiet") == ""
    clock.advance(130.0)  # two minutes on, it is forgotten
    budget.begin("loud")
    assert budget.take("loud") == ""


def test_total_failure_multiplies_the_load_by_no_more_than_the_budget():
    budget, _ = budget_with(500)
    repeats = sum(budget.take(f"tenant-{n % 500}") == "" for n in range(1500))
    assert (500 + repeats) / 500 <= 1.2


def test_tenants_are_forgotten_not_hoarded():
    budget, _ = budget_with(5 * MAX_TENANTS)
    assert len(budget._tenants) == MAX_TENANTS


def test_a_window_forgets_piece_by_piece():
    window = Windowed()
    window.add(1000.0, first=1.0)
    window.add(1050.0, first=10.0, second=3.0)
    assert window.read(1060.0) == (11.0, 3.0)
    assert window.read(1125.0) == (10.0, 3.0)
    assert window.read(1180.0) == (0.0, 0.0)
    window.add(9000.0, first=2.0)
    assert window.read(9000.0) == (2.0, 0.0)


def throttle_after(num_accepted, num_refused, num_gone=0):
    clock = ManualClock()
    throttle = Throttle(RetryConfig(), clock, Random(1))
    for result, count in (
        (AttemptResult.OK, num_accepted),
        (AttemptResult.REFUSED, num_refused),
        (AttemptResult.CLIENT_GONE, num_gone),
    ):
        for _ in range(count):
            throttle.note("pool", result)
    throttle.tick()
    return throttle, clock


def test_a_pool_that_refuses_most_is_spared_some():
    throttle, clock = throttle_after(10, 90)
    assert throttle.shares == {"pool": pytest.approx((100 - 2 * 10) / 101)}
    refused = sum(throttle.refuses("pool") for _ in range(1000))
    assert 750 < refused < 830
    clock.advance(130.0)
    throttle.tick()
    assert not throttle.refuses("pool")
    assert throttle._pools == {}


@pytest.mark.parametrize("counts", [(50, 50), (100, 0), (1, 0, 500), (0, 0, 500)])
def test_a_pool_that_accepts_half_is_left_alone(counts):
    throttle, _ = throttle_after(*counts)
    assert throttle.shares == {}
    assert not throttle.refuses("pool")


def test_what_broke_was_accepted_first():
    throttle, _ = throttle_after(0, 0)
    for _ in range(100):
        throttle.note("pool", AttemptResult.BROKEN)
    throttle.tick()
    assert throttle.shares == {}


def test_nor_does_who_could_not_be_reached_say_that_the_pool_is_full():
    throttle, _ = throttle_after(0, 0)
    for _ in range(100):
        throttle.note("pool", AttemptResult.CONNECT_FAILED)
    throttle.tick()
    assert throttle.shares == {}


@pytest.mark.parametrize(("num_refused", "is_known"), [(31, False), (32, True)])
def test_a_few_refusals_mean_nothing(num_refused, is_known):
    throttle, _ = throttle_after(0, num_refused)
    assert ("pool" in throttle.shares) is is_known


def test_a_death_covers_what_the_engine_had_and_no_more():
    clock = ManualClock()
    losses = Losses(clock)
    assert [losses.covers("a", "1", 3 - number) for number in range(3)] == [True] * 3
    assert not losses.covers("a", "1", 50)  # it is given more, and loses that too
    assert losses.covers("b", "1", 1)
    clock.advance(9.0)
    assert not losses.covers("a", "1", 50)
    clock.advance(10.0)  # quiet for long enough: another death
    assert losses.covers("a", "1", 2)
    assert set(losses._allowed) == {"a"}  # what is over is forgotten


def test_an_engine_that_was_started_again_may_die_again_at_once():
    losses = Losses(ManualClock())
    assert losses.covers("a", "1", 1)
    assert [losses.covers("a", "2", 3 - number) for number in range(4)] == [True] * 3 + [False]
    assert losses.covers("a", "3", 1)
    assert len(losses._allowed) == 1
