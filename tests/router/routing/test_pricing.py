"""The price of an endpoint: what it told, and what we placed there since."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.stream import SILENCE_S, Load
from octavo_router.routing import pricing
from octavo_router.routing.pricing import SEQUENCE_TOKENS, TURN_S
from tests.fakes.endpoints import World, make_endpoint, make_request


def report(endpoint, at, **load):
    endpoint.load, endpoint.load_at = Load(**load), at
    pricing.note_report(endpoint)


def test_the_price_is_work_over_speed():
    endpoint = make_endpoint(token_s=0.001)
    report(endpoint, 10.0, queued_tokens=1000, running=3, waiting=1)
    assert endpoint.base_tokens == 1000 + 4 * SEQUENCE_TOKENS
    assert pricing.wait_s(endpoint, 200) == pytest.approx(0.001 * (1256 + 200))
    assert pricing.seconds(endpoint, 200) == pytest.approx(0.001 * (1256 + 1.5 * 200))


def test_what_is_placed_counts_at_once():
    endpoint = make_endpoint()
    report(endpoint, 10.0)
    before = pricing.seconds(endpoint, 1)
    pricing.reserve(endpoint, 500)
    more = pricing.seconds(endpoint, 1) - before
    assert more == pytest.approx((500 + SEQUENCE_TOKENS) * endpoint.token_s)


def test_our_work_is_the_engines_to_tell_two_turns_later():
    endpoint = make_endpoint()
    report(endpoint, 10.0)
    pricing.reserve(endpoint, 500)
    weight = 500 + SEQUENCE_TOKENS
    report(endpoint, 10.0 + TURN_S, running=1, queued_tokens=500)
    assert endpoint.own_tokens == weight  # the report may have left before it arrived
    report(endpoint, 10.0 + 1.5 * TURN_S, running=1, queued_tokens=400)
    assert endpoint.own_tokens == weight  # too soon for another turn
    report(endpoint, 10.0 + 2.1 * TURN_S, running=1, queued_tokens=300)
    assert endpoint.own_tokens == 0
    assert endpoint.base_tokens == 300 + SEQUENCE_TOKENS


def test_a_slow_reporter_has_counted_all_that_was_placed_before():
    endpoint = make_endpoint()
    report(endpoint, 10.0)
    pricing.reserve(endpoint, 500)
    report(endpoint, 11.0, running=1, queued_tokens=500)
    assert endpoint.own_tokens == 0


def test_requests_that_the_engine_does_not_know_yet_are_not_forgotten():
    endpoint = make_endpoint()
    report(endpoint, 10.0)
    for _ in range(20):
        pricing.reserve(endpoint, 1)
    report(endpoint, 11.0, running=2)
    assert endpoint.base_tokens == 20 * SEQUENCE_TOKENS


def test_release_takes_back_exactly_what_still_counts():
    endpoint = make_endpoint()
    report(endpoint, 10.0)
    first = pricing.reserve(endpoint, 500)
    report(endpoint, 10.0 + TURN_S, running=1)
    second = pricing.reserve(endpoint, 70)
    report(endpoint, 10.0 + 2.1 * TURN_S, running=2)
    assert endpoint.own_tokens == 70 + SEQUENCE_TOKENS
    pricing.release_prompt(endpoint, 500, first)
    pricing.release_sequence(endpoint, first)
    assert endpoint.own_tokens == 70 + SEQUENCE_TOKENS  # the first is in the report
    pricing.release_prompt(endpoint, 70, second)
    pricing.release_sequence(endpoint, second)
    assert (endpoint.own_tokens, endpoint.pending_tokens, endpoint.in_flight) == (0, 0, 0)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(1, 3000)),
        st.tuples(st.just("first"), st.integers(0, 30)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("report"), st.floats(0.0, 1.2)),
        st.tuples(st.just("silence"), st.integers(0, 5000)),
    ),
    max_size=60,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(steps)
def test_in_any_order_nothing_is_lost_or_counted_twice(steps):
    endpoint = make_endpoint()
    now = 10.0
    held = []  # [uncached, generation, owes its prompt]
    for kind, value in steps:
        if kind == "place":
            held.append([value, pricing.reserve(endpoint, value), True])
        elif kind == "first" and value < len(held) and held[value][2]:
            held[value][2] = False
            pricing.release_prompt(endpoint, held[value][0], held[value][1])
        elif kind == "finish" and value < len(held):
            uncached, generation, owes = held.pop(value)
            if owes:
                pricing.release_prompt(endpoint, uncached, generation)
            pricing.release_sequence(endpoint, generation)
        elif kind == "report":
            now += value
            report(endpoint, now, running=1)
        elif kind == "silence":
            pricing.count_alone(endpoint, base_tokens=value)

        def weight(of):
            return sum(u * owes + SEQUENCE_TOKENS for u, _, owes in of)

        assert endpoint.in_flight == len(held)
        assert endpoint.pending_tokens == sum(u for u, _, owes in held if owes)
        counted = [item for item in held if item[1] >= endpoint.counts_from]
        assert endpoint.own_tokens == weight(counted)
        recent = [item for item in held if item[1] == endpoint.generation]
        assert endpoint.recent_tokens == weight(recent)


@pytest.mark.parametrize(
    "load",
    [
        {"queued_tokens": -1},
        {"running": -5},
        {"waiting": 10**9},
        {"kv_usage": math.nan},
        {"kv_usage": 1.5},
        {"prefill_tokens_per_s": math.inf},
        {"queued_tokens": math.nan},
    ],
)
def test_a_nonsensical_report_is_as_good_as_none(load):
    endpoint = make_endpoint()
    report(endpoint, 10.0, running=2, queued_tokens=100)
    pricing.reserve(endpoint, 50)
    report(endpoint, 11.0, **load)
    assert endpoint.base_tokens == 0
    assert endpoint.own_tokens == 50 + SEQUENCE_TOKENS
    assert math.isfinite(pricing.seconds(endpoint, 1))


def test_silence_is_not_taken_for_idleness():
    world = World(3)
    busy, busy_too, silent = world.endpoints
    for endpoint in (busy, busy_too, silent):
        world.tell(endpoint, running=10, queued_tokens=4000)
    world.dispatcher.tick()
    world.clock.advance(SILENCE_S + 1.0)
    for endpoint in (busy, busy_too):
        world.tell(endpoint, running=10, queued_tokens=4000)
    world.dispatcher.tick()
    assert silent.base_tokens + silent.own_tokens == 4000 + 10 * SEQUENCE_TOKENS
    picks = {world.place(make_request((str(i), 4))).endpoint.id for i in range(3)}
    assert picks == {"pod-0", "pod-1", "pod-2"}


def test_speeds_that_differ_by_noise_only_are_equal():
    world = World(3)
    for endpoint, speed in zip(world.endpoints, (1000.0, 1200.0, 6000.0), strict=True):
        world.tell(endpoint, prefill_tokens_per_s=speed)
    world.dispatcher.tick()
    slow, usual, fast = (endpoint.token_s for endpoint in world.endpoints)
    assert slow == usual == pytest.approx(1 / 1200)
    assert fast == pytest.approx(1 / 6000)


def test_an_engine_of_unknown_speed_has_its_pools():
    world = World(2)
    world.tell(world.endpoints[0], prefill_tokens_per_s=100.0)
    world.dispatcher.tick()
    newcomer = world.add(1)[0]
    assert newcomer.token_s == pytest.approx(1 / 100)


def test_a_saturated_engine_comes_last():
    world = World(2)
    full, other = world.endpoints
    world.tell(full, is_saturated=True)
    world.tell(other, running=100, queued_tokens=50_000)
    assert world.place(make_request(("p", 4))).endpoint is other


def test_a_nearly_full_pool_is_avoided():
    world = World(2)
    full, other = world.endpoints
    world.tell(full, running=4, kv_usage=0.98)
    world.tell(other, running=20, kv_usage=0.3)
    assert world.place(make_request(("p", 4))).endpoint is other


def test_waiting_for_a_seat_costs_more_than_waiting_for_prefill():
    seated, full = make_endpoint(max_num_seqs=8), make_endpoint(max_num_seqs=8)
    report(seated, 10.0, running=6, waiting=4)
    report(full, 10.0, running=8, waiting=2)
    assert full.base_tokens > seated.base_tokens
