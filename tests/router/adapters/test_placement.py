"""Which adapters are loaded where: the pure function alone."""

from __future__ import annotations

import random

import pytest

from octavo_router.adapters.demand import HALF_LIFE_S, AdapterDemand
from octavo_router.adapters.placement import (
    MAX_LOADING,
    MIN_AGE_S,
    STRANGER_AGE_S,
    AdapterMove,
    AdapterNeed,
    EngineSlots,
    place_adapters,
)

OLD = 60.0  # seconds that an adapter has been there
ANY = frozenset([frozenset[str]()])


def engine(name: str, *adapters: str, capacity: int = 2, age_s: float = OLD, **facts: object):
    loaded = dict.fromkeys(adapters, age_s)
    return EngineSlots(name, capacity, loaded=loaded, **facts)  # type: ignore[arg-type]


def waiting(name: str, *engines: str, rate: float = 0.0) -> AdapterNeed:
    within = frozenset([frozenset(engines)])
    return AdapterNeed(name, rate, num_waiting=1, within=within)


def moves(engines: list[EngineSlots], *needs: AdapterNeed, **facts: object) -> list[AdapterMove]:
    return place_adapters(engines, needs, load_s=0.05, **facts)  # type: ignore[arg-type]


def test_what_is_waited_for_goes_where_the_queue_is_shortest():
    engines = [engine("a", wait_s=0.5), engine("b", wait_s=0.1), engine("c", wait_s=0.3)]
    assert moves(engines, waiting("x")) == [AdapterMove("b", load="x")]


def test_a_load_under_way_is_waited_for():
    engines = [engine("a", loading=frozenset("x")), engine("b")]
    assert moves(engines, waiting("x")) == []


def test_who_may_only_use_some_engines_gets_it_there():
    engines = [engine("a", "x"), engine("b"), engine("c")]
    assert moves(engines, waiting("x", "b")) == [AdapterMove("b", load="x")]


def test_the_coldest_makes_room():
    engines = [engine("a", "hot", "cold", wait_s=0.0)]
    needs = [waiting("x"), AdapterNeed("hot", 5.0), AdapterNeed("cold", 0.1)]
    assert moves(engines, *needs) == [AdapterMove("a", load="x", unload="cold")]


def test_of_two_engines_the_one_with_the_colder_adapter_makes_room():
    engines = [engine("a", "p", capacity=1), engine("b", "q", capacity=1)]
    needs = [waiting("x"), AdapterNeed("p", 0.001), AdapterNeed("q", 2.0)]
    assert moves(engines, *needs) == [AdapterMove("a", load="x", unload="p")]


def test_a_copy_makes_room_before_the_last_one_of_another():
    engines = [engine("a", "twice", "once"), engine("b", "twice", "p", wait_s=9.0)]
    needs = [waiting("x"), AdapterNeed("twice", 2.0), AdapterNeed("once", 1.0), AdapterNeed("p")]
    found = moves(engines, *needs, total_rate=100.0)
    assert found == [AdapterMove("a", load="x", unload="twice")]


@pytest.mark.parametrize(
    "in_the_way",
    [
        engine("a", "p", capacity=1, busy=frozenset("p")),
        engine("a", "p", capacity=1, age_s=MIN_AGE_S / 2),
        engine("a", "pinned", capacity=1),
        engine("a", capacity=1, loading=frozenset("p")),
        engine("a", capacity=1, unloading=frozenset("p")),
        engine("a", failed=frozenset("x")),
        engine("a", capacity=9, loading=frozenset(map(str, range(MAX_LOADING)))),
    ],
    ids=["in-use", "new", "pinned", "loading", "unloading", "failed", "busy-loading"],
)
def test_rather_than_thrash_it_waits(in_the_way: EngineSlots):
    needs = [waiting("x"), AdapterNeed("p"), AdapterNeed("pinned", pinned=True)]
    assert "x" not in [move.load for move in moves([in_the_way], *needs)]


def test_a_pinned_one_is_loaded_everywhere():
    engines = [engine("a"), engine("b", "old", capacity=1)]
    found = moves(engines, AdapterNeed("x", pinned=True), AdapterNeed("old", 9.0), total_rate=99.0)
    assert found[:2] == [AdapterMove("a", load="x"), AdapterMove("b", load="x", unload="old")]


def test_a_hot_one_gets_engines_by_its_share():
    """Half of all requests of four engines, where one engine's share is a quarter."""
    engines = [engine("a", "hot", "p"), engine("b", "q", "r"), engine("c", "s"), engine("d", "t")]
    others = [AdapterNeed(name, 1.0) for name in "pqrst"]
    assert moves(engines, AdapterNeed("hot", 0.1), *map(AdapterNeed, "pqrst")) == []  # of few
    (first,) = moves(engines, AdapterNeed("hot", 5.0), *others)
    assert first.load == "hot"
    assert first.engine in ("c", "d")  # which have room


def test_a_replica_replaces_only_what_is_worth_much_less():
    engines = [engine("a", "hot", capacity=1), engine("b", "warm", capacity=1)]
    hot = AdapterNeed("hot", 4.0)
    assert moves(engines, hot, AdapterNeed("warm", 1.5)) == []
    assert moves(engines, hot, AdapterNeed("warm", 0.1)) == [
        AdapterMove("b", load="hot", unload="warm")
    ]


def test_a_long_queue_where_it_lies_is_worth_a_replica():
    engines = [engine("a", "x", wait_s=5.0), engine("b", wait_s=0.0)]
    replica = [AdapterMove("b", load="x")]
    assert moves(engines, AdapterNeed("x", 1.0), total_rate=5.0) == replica
    assert moves(engines, AdapterNeed("x", 0.01), total_rate=5.0) == []  # too few ask for it
    assert moves([engine("a", "x"), engines[1]], AdapterNeed("x", 1.0), total_rate=5.0) == []


def test_idle_slots_are_filled_and_nothing_makes_room_for_that():
    engines = [engine("a", "p", capacity=2), engine("b", "q", capacity=1)]
    needs = [AdapterNeed("p"), AdapterNeed("q"), AdapterNeed("x"), AdapterNeed("y", 0.2)]
    assert moves(engines, *needs) == [AdapterMove("a", load="y")]


def test_what_is_retired_leaves_and_strangers_after_a_while():
    engines = [engine("a", "gone", "used", busy=frozenset(["used"]))]
    assert moves(engines, retired=frozenset(["gone", "used"])) == [AdapterMove("a", unload="gone")]
    young = engine("a", "stranger", age_s=STRANGER_AGE_S / 2)
    assert moves([young]) == []
    assert moves([engine("a", "stranger")]) == [AdapterMove("a", unload="stranger")]


def test_the_same_facts_in_any_order_give_the_same_moves():
    rng = random.Random(1)
    names = [f"x{number}" for number in range(40)]
    needs = [AdapterNeed(name, rng.random(), num_waiting=0) for name in names]
    engines = [
        engine(f"e{i}", *rng.sample(names, 3), capacity=4, wait_s=rng.random()) for i in range(5)
    ]
    first = moves(engines, *needs)
    assert first
    for _ in range(5):
        rng.shuffle(needs)
        assert moves(engines, *needs) == first


@pytest.mark.parametrize("seed", range(20))
def test_no_engine_gets_more_than_it_holds_and_steady_demand_comes_to_rest(seed: int):
    """Whatever the demand: moves are carried out at once, and after some rounds none is left."""
    rng = random.Random(seed)
    names = [f"x{number}" for number in range(30)]
    needs = [AdapterNeed(name, rng.expovariate(1.0) ** 3) for name in names]
    held: dict[str, set[str]] = {f"e{i}": set() for i in range(4)}
    for _ in range(60):
        found = moves([engine(e, *sorted(a), capacity=5) for e, a in held.items()], *needs)
        for move in found:
            held[move.engine] -= {move.unload}
            if move.load:
                assert move.load not in held[move.engine]
                held[move.engine].add(move.load)
            assert len(held[move.engine]) <= 5
        if not found:
            break
    assert not found
    assert all(len(adapters) == 5 for adapters in held.values())


def test_demand_halves_in_its_half_life():
    demand = AdapterDemand()
    for _ in range(10):
        demand.note("x", 100.0)
    first = demand.rate("x", 100.0)
    assert demand.rate("x", 100.0 + HALF_LIFE_S) == pytest.approx(first / 2)
    assert demand.total_rate(100.0) == pytest.approx(first)
    demand.forget_old(100.0 + 20 * HALF_LIFE_S)
    assert demand.rate("x", 100.0) == 0.0


def test_steady_requests_show_as_their_rate():
    demand = AdapterDemand()
    for number in range(4000):
        demand.note("x", number * 0.25)
    assert demand.rate("x", 1000.0) == pytest.approx(4.0, rel=0.02)
