"""What engines died of: where it may still go, when it is refused, and what clears it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo_router.config.settings import RetryConfig
from octavo_router.endpoints.endpoint import Address, Endpoint, EndpointSpec
from octavo_router.endpoints.registry import Change
from octavo_router.flow import quarantine as module
from octavo_router.flow.quarantine import MAX_COPIES, PROOF_S, Quarantine, key_of
from tests.fakes.clock import ManualClock

KEY = key_of("pool", "/v1/chat/completions", b"{}")
A, B, C = (Endpoint(EndpointSpec(id=name, address=Address(name, 1))) for name in "abc")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def quarantine(clock: ManualClock) -> Quarantine:
    return Quarantine(RetryConfig(), clock)


def die(quarantine: Quarantine, clock: ManualClock, endpoint: Endpoint, key: int = KEY) -> bool:
    """An attempt that its engine dies of, a tenth of a second later."""
    quarantine.begin(key, endpoint.id)
    sent_at = clock()
    clock.advance(0.1)
    is_refused = quarantine.lost(key, endpoint, sent_at, is_said=False)
    quarantine.end(key, endpoint.id)
    return is_refused


def test_the_second_death_is_the_last_and_the_time_is_over_once(quarantine, clock):
    assert not die(quarantine, clock, A)
    assert quarantine.refusal(KEY) is None
    assert die(quarantine, clock, B)
    error = quarantine.refusal(KEY)
    assert (error.status, error.code) == (422, "request_quarantined")
    assert "600 s" in error.message
    clock.advance(599.0)
    assert quarantine.refusal(KEY) is not None
    clock.advance(2.0)
    assert quarantine.refusal(KEY) is None
    assert quarantine.watched == {}


def test_one_engine_that_dies_twice_counts_twice(quarantine, clock):
    assert not die(quarantine, clock, A)
    clock.advance(1.0)
    assert die(quarantine, clock, A)


def test_other_requests_are_not_touched(quarantine, clock):
    die(quarantine, clock, A)
    die(quarantine, clock, B)
    for other in (("p", "/v1/chat/completions", b"{}"), ("pool", "/x", b"{}"), ("pool", "/x", b"")):
        assert quarantine.refusal(key_of(*other)) is None
        assert quarantine.engines(key_of(*other)) is None


def test_an_answer_between_two_deaths_clears_it(quarantine, clock):
    die(quarantine, clock, A)
    quarantine.begin(KEY, B.id)
    quarantine.answered(KEY)
    assert not die(quarantine, clock, B)
    assert die(quarantine, clock, C)


def test_first_tokens_clear_only_what_got_further_than_where_an_engine_died(quarantine, clock):
    die(quarantine, clock, A)
    quarantine.answered(KEY, is_further=False)
    assert die(quarantine, clock, B)


def test_copies_that_one_death_takes_along_are_one_death(quarantine, clock):
    for _ in range(3):
        quarantine.begin(KEY, A.id)
    sent_at = clock()
    clock.advance(0.1)
    assert [quarantine.lost(KEY, A, sent_at, is_said=said) for said in (False, True, False)] == [
        False
    ] * 3


def test_what_a_dead_engine_refuses_did_not_kill_it(quarantine, clock):
    die(quarantine, clock, A, key=1)
    clock.advance(0.05)
    assert not quarantine.lost(KEY, A, clock(), is_said=True)
    assert not die(quarantine, clock, B)


def test_a_connection_that_broke_without_a_death_does_not_count_for_long(quarantine, clock):
    die(quarantine, clock, A)
    clock.advance(10.0)  # and nobody has seen it down
    assert not die(quarantine, clock, B)


def test_a_death_that_signals_saw_counts_for_as_long_as_refusals_last(quarantine, clock):
    die(quarantine, clock, A)
    clock.advance(0.5)
    quarantine.changed(Change("state", replace(A, state="down")))
    clock.advance(500.0)
    assert die(quarantine, clock, B)


def test_until_it_is_answered_all_copies_go_to_two_engines(quarantine, clock):
    assert quarantine.engines(KEY) is None
    quarantine.begin(KEY, A.id)
    assert quarantine.engines(KEY) is None
    quarantine.begin(KEY, B.id)
    assert set(quarantine.engines(KEY)) == {A.id, B.id}
    for _ in range(MAX_COPIES - 2):
        quarantine.begin(KEY, A.id)
    assert list(quarantine.engines(KEY)) == []  # later, then
    quarantine.answered(KEY)
    assert quarantine.engines(KEY) is None


def test_what_runs_for_a_while_goes_anywhere(quarantine, clock):
    quarantine.begin(KEY, A.id)
    quarantine.begin(KEY, B.id)
    clock.advance(PROOF_S)
    assert quarantine.engines(KEY) is None


def test_a_suspect_goes_to_one_engine_at_a_time(quarantine, clock):
    die(quarantine, clock, A)
    assert quarantine.engines(KEY) is None
    quarantine.begin(KEY, B.id)
    clock.advance(60.0)
    assert set(quarantine.engines(KEY)) == {B.id}
    quarantine.end(KEY, B.id)
    assert quarantine.engines(KEY) is None


def test_nothing_is_left_of_attempts_that_came_to_nothing(quarantine, clock):
    for id_ in (A.id, B.id, A.id):
        quarantine.begin(KEY, id_)
    for id_ in (A.id, A.id, B.id):
        quarantine.end(KEY, id_)
    assert quarantine.watched == {}


def test_it_is_bounded(quarantine, clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_WATCHED", 100)
    die(quarantine, clock, A, key=-1)
    for key in range(1000):
        quarantine.begin(key, A.id)
        quarantine.answered(key)
    assert len(quarantine.watched) <= 101
    assert die(quarantine, clock, B, key=-1)  # who is suspect stays so


def test_it_can_be_switched_off(clock):
    quarantine = Quarantine(RetryConfig(quarantine_s=0.0), clock)
    for endpoint in (A, B, C):
        assert not die(quarantine, clock, endpoint)
    assert quarantine.refusal(KEY) is None
