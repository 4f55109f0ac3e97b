"""The small parts that decisions are made of: prefixes under way, room, token rates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.config.settings import FlowConfig
from octavo_router.residency.underway import PyUnderway, names_of, num_common, num_inner
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.estimate import TokenRates
from octavo_router.routing.outcome import AttemptResult
from tests.fakes.endpoints import World, make_endpoint, make_keys


@pytest.mark.parametrize(
    ("num_keys", "lengths"),
    [(0, []), (1, [1]), (4, [4]), (5, [4, 5]), (8, [4, 8]), (9, [4, 8, 9]), (20, [4, 8, 16, 20])],
)
def test_a_prompt_is_known_by_a_few_of_its_keys(num_keys, lengths):
    keys = make_keys(("p", num_keys))
    assert list(names_of(keys)) == [keys[8 * n - 8 : 8 * n] for n in lengths]
    assert num_inner(num_keys) == max(0, len(lengths) - 1)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_the_common_prefix_is_found_exactly(shared, one, other):
    left = make_keys(("shared", shared), ("left", one))
    right = make_keys(("shared", shared), ("right", other))
    assert num_common(left, right) == shared


def test_what_is_being_computed_counts_as_there_until_it_is_computed():
    underway = PyUnderway()
    here, there = make_endpoint(0), make_endpoint(1)
    keys = make_keys(("system", 10), ("mine", 5))
    underway.compute(names_of(keys), keys, there)
    other = make_keys(("system", 10), ("yours", 3))
    matched = [7, 2]
    underway.credit(names_of(other), other, [here, there], matched, 16.0)
    assert matched == [7, 160]
    underway.computed(names_of(keys), there)
    matched = [7, 2]
    underway.credit(names_of(other), other, [here, there], matched, 16.0)
    assert matched == [7, 2]


def test_a_prefix_is_credited_to_everybody_who_computes_it():
    underway = PyUnderway()
    here, there = make_endpoint(0), make_endpoint(1)
    long, short = make_keys(("system", 40)), make_keys(("system", 9))
    underway.compute(names_of(long), long, here)
    underway.compute(names_of(short), short, there)
    matched = [0, 0]
    underway.credit(names_of(long), long, [here, there], matched, 1.0)
    assert matched == [40, 9]


def test_sharers_are_counted_by_prefix():
    underway = PyUnderway()
    prompts = [make_keys(("system", 8), (f"q{n}", 8)) for n in range(3)]
    for keys in prompts:
        underway.begin(names_of(keys))
    names = names_of(prompts[0])
    assert [underway.sharers(name) for name in names] == [3, 3, 1]
    for keys in prompts:
        underway.end(names_of(keys))
    assert underway.sharers(names[0]) == 0


def test_room_is_what_seats_and_reports_leave():
    world = World(2)
    rooms = PoolCapacity(world.registry, FlowConfig(in_flight_factor=1.5, max_in_flight=10))
    first, second = world.endpoints
    first.max_num_seqs, second.max_num_seqs = 4, 0
    assert rooms.room("pool") == 6 + 10
    first.in_flight = 6
    second.in_flight = 9
    assert rooms.room("pool") == 1
    world.tell(second, running=30)  # other routers' requests
    assert rooms.room("pool") == 0
    assert not rooms.has_room("pool")
    first.in_flight = 0
    assert rooms.has_room("pool")
    world.tell(first, is_saturated=True)
    assert not rooms.has_room("pool")
    assert not rooms.is_empty("pool")
    assert rooms.is_empty("elsewhere")
    assert rooms.room("elsewhere") == 0


def test_a_returning_endpoint_has_less_room():
    world = World(1)
    rooms = PoolCapacity(world.registry, FlowConfig(in_flight_factor=1.0))
    world.endpoints[0].max_num_seqs = 100
    world.endpoints[0].share = 0.2
    assert rooms.room("pool") == 20
    world.endpoints[0].share = 0.001
    assert rooms.room("pool") == 1


def test_token_rates_settle_and_ignore_nonsense():
    rates = TokenRates()
    assert rates.estimate("a", 400) == 101
    for _ in range(200):
        rates.learn("a", 1000, 500)
    assert rates.estimate("a", 400) == 201
    assert rates.per_key("a") == pytest.approx(32.0)
    rates.learn("a", 3, 3000)
    rates.learn("a", 1000, 0)
    rates.learn("b", 1000, 10**9)
    assert rates.estimate("a", 400) == 201
    assert rates.estimate("b", 400) == 401  # never more than a token a byte


def test_what_speaks_against_an_endpoint():
    assert [result.value for result in AttemptResult if result.is_failure] == [
        "connect_failed",
        "broken",
        "timeout",
        "bad_answer",
        "error_5xx",
    ]
    assert [
        result.value for result in AttemptResult if result.is_verdict and not result.is_failure
    ] == ["ok"]
