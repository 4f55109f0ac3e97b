"""Health by results: ejection, readmission, slow start, and never more than half of a pool."""

import pytest

from octavo_router.routing.outcome import AttemptResult, Outcome
from tests.fakes.endpoints import World, make_request, state_of

OK = Outcome(AttemptResult.OK, itl_s=0.02, output_tokens=10)
FAILED = Outcome(AttemptResult.BROKEN)
ERROR = Outcome(AttemptResult.ERROR_5XX)  # of the engine's making, or of the request's


def answer(world, endpoint, outcome, count=1):
    for _ in range(count):
        world.health.note(world.registry, endpoint, outcome, world.clock())


def states(world):
    return [endpoint.state for endpoint in world.endpoints]


def settle(world):
    """Let canaries of idle endpoints answer alike, and everybody be established."""
    world.clock.advance(20.0)
    for endpoint in world.dispatcher.tick():
        world.dispatcher.canary_finished(endpoint, " Paris")


def test_five_failures_in_a_row_eject():
    world = World(4)
    first = world.endpoints[0]
    answer(world, first, FAILED, 4)
    answer(world, first, OK)
    answer(world, first, FAILED, 4)
    assert state_of(first) == "ready"
    answer(world, first, FAILED)
    assert state_of(first) == "ejected"
    assert first.reason == "5 failures in a row, the last one broken"


def test_what_may_be_the_requests_own_fault_ejects_only_after_a_failed_test():
    world = World(4)
    settle(world)
    first = world.endpoints[0]
    answer(world, first, ERROR, 4)
    assert first not in world.dispatcher.tick()
    answer(world, first, ERROR)
    assert state_of(first) == "ready"
    assert first in world.dispatcher.tick()
    world.dispatcher.canary_finished(first, None)
    assert state_of(first) == "ejected"
    assert first.reason == "5 errors in a row, and its test generation failed"


def test_no_number_of_bad_requests_ejects_an_engine_that_passes_its_tests():
    world = World(4)
    settle(world)
    first = world.endpoints[0]
    for endpoint in world.endpoints:
        answer(world, endpoint, OK, 20)
    for _ in range(20):
        answer(world, first, ERROR, 12)
        assert first in world.dispatcher.tick()
        world.dispatcher.canary_finished(first, " Paris")
        assert first not in world.dispatcher.tick()
        world.clock.advance(0.1)
    assert states(world) == ["ready"] * 4


def test_errors_far_more_often_than_elsewhere_ask_for_a_test_too():
    world = World(4)
    settle(world)
    for endpoint in world.endpoints:
        answer(world, endpoint, OK, 27)
    for _ in range(3):
        answer(world, world.endpoints[2], ERROR)
        answer(world, world.endpoints[2], OK)
    assert world.endpoints[2] in world.dispatcher.tick()
    assert states(world) == ["ready"] * 4
    world.dispatcher.canary_finished(world.endpoints[2], None)
    assert state_of(world.endpoints[2]) == "ejected"


def test_a_test_that_is_refused_for_want_of_room_decides_nothing():
    world = World(4)
    settle(world)
    first = world.endpoints[0]
    answer(world, first, ERROR, 5)
    for _ in range(3):
        assert first in world.dispatcher.tick()
        world.dispatcher.canary_finished(first, None, is_refused=True)
        assert state_of(first) == "ready"


@pytest.mark.parametrize(
    ("waited_s", "answers_others", "is_tested"),
    [(600.0, False, True), (600.0, True, False), (5.0, False, False)],
)
def test_one_that_lets_a_request_expire_is_tested_unless_it_answers_others(
    waited_s: float, answers_others: bool, is_tested: bool
):
    world = World(4)
    settle(world)
    first = world.endpoints[0]
    answer(world, first, OK)
    world.clock.advance(waited_s)
    for endpoint in world.endpoints:
        world.health._records[endpoint.id].canary_at = world.clock()  # idle ones are tested anyway
    if answers_others:
        answer(world, first, OK)
    answer(world, first, Outcome(AttemptResult.EXPIRED, duration_s=waited_s))
    assert (first in world.dispatcher.tick()) is is_tested
    assert state_of(first) == "ready"


def test_a_busy_endpoint_is_not_compared_with_idle_ones():
    world = World(3)
    for endpoint, (itl_s, tokens) in zip(
        world.endpoints, [(0.1, 400), (0.02, 40), (0.02, 40)], strict=True
    ):
        answer(world, endpoint, Outcome(AttemptResult.OK, itl_s=itl_s, output_tokens=tokens), 12)
    world.dispatcher.tick()
    assert states(world) == ["ready"] * 3
    answer(world, world.endpoints[1], Outcome(AttemptResult.OK, itl_s=0.02, output_tokens=400), 12)
    world.dispatcher.tick()  # one as busy as it, and five times as fast
    assert states(world) == ["ejected", "ready", "ready"]


def test_answers_that_are_no_streams_say_nothing_of_speed():
    """They come at once when they are done: beside them streams would look slow."""
    world = World(2)
    streams, wholes = world.endpoints
    answer(world, streams, Outcome(AttemptResult.OK, itl_s=0.05, output_tokens=50), 20)
    answer(world, wholes, Outcome(AttemptResult.OK, duration_s=0.1, output_tokens=50), 20)
    world.dispatcher.tick()
    assert states(world) == ["ready"] * 2


def test_an_ejected_one_keeps_its_reason_while_it_comes_and_goes():
    world = World(4)
    first = world.endpoints[0]
    answer(world, first, FAILED, 5)
    why = first.reason
    world.registry.report(first, "down", "it is gone")
    assert first.reason == "it is gone"
    world.registry.report(first, "ready")
    assert (state_of(first), first.reason) == ("ejected", why)


@pytest.mark.parametrize(
    "result", [AttemptResult.REFUSED, AttemptResult.CLIENT_GONE, AttemptResult.REJECTED]
)
def test_what_is_not_its_fault_does_not_count(result):
    world = World(4)
    first = world.endpoints[0]
    answer(world, first, FAILED, 4)
    answer(world, first, Outcome(result), 20)
    assert state_of(first) == "ready"
    answer(world, first, FAILED)
    assert state_of(first) == "ejected"


@pytest.mark.parametrize("num_endpoints, allowed", [(1, 0), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_at_most_half_of_a_pool_is_ejected(num_endpoints, allowed):
    world = World(num_endpoints)
    for endpoint in world.endpoints:
        answer(world, endpoint, FAILED, 10)
    assert states(world).count("ejected") == allowed
    assert len(world.registry.routable("pool")) == num_endpoints - allowed


def test_an_ejected_one_comes_back_by_a_test_generation_only():
    world = World(4)
    settle(world)
    first = world.endpoints[0]
    answer(world, first, FAILED, 5)
    world.clock.advance(9.0)
    assert first not in world.dispatcher.tick()
    world.clock.advance(1.5)
    assert first in world.dispatcher.tick()
    assert first not in world.dispatcher.tick()  # one test at a time
    assert state_of(first) == "ejected"
    world.dispatcher.canary_finished(first, " Paris")
    assert state_of(first) == "ready"
    assert world.health.num_readmissions == 1


def test_each_ejection_in_a_row_takes_longer_up_to_five_minutes():
    world = World(4)
    first = world.endpoints[0]
    answer(world, first, FAILED, 5)
    waits = []
    for _ in range(40):
        began = world.clock.now
        while first not in world.dispatcher.tick():
            world.clock.advance(1.0)
        waits.append(world.clock.now - began)
        world.dispatcher.canary_finished(first, None)
    assert waits[:3] == [10.0, 20.0, 30.0]
    assert waits[-1] == 300.0


def test_a_wrong_answer_is_no_readmission_and_ejects_a_ready_one():
    world = World(4)
    settle(world)
    liar = world.endpoints[1]
    world.dispatcher.canary_finished(liar, " London")
    assert state_of(liar) == "ejected"
    assert liar.reason == "its test generation was wrong"
    world.clock.advance(11.0)
    assert liar in world.dispatcher.tick()
    world.dispatcher.canary_finished(liar, " London")
    assert state_of(liar) == "ejected"


def test_idle_endpoints_are_tested_and_busy_ones_are_not():
    world = World(2)
    busy, idle = world.endpoints
    world.clock.advance(10.0)
    assert set(world.dispatcher.tick()) == {busy, idle}
    for endpoint in (busy, idle):
        world.dispatcher.canary_finished(endpoint, "x")
    world.clock.advance(5.0)
    answer(world, busy, OK)
    world.clock.advance(5.0)
    assert world.dispatcher.tick() == [idle]


def test_a_gray_endpoint_is_found_by_its_speed():
    world = World(4)
    for endpoint in world.endpoints:
        slow = endpoint.id == "pod-3"
        answer(world, endpoint, Outcome(AttemptResult.OK, itl_s=0.1 if slow else 0.02), 12)
    world.dispatcher.tick()
    assert states(world) == ["ready", "ready", "ready", "ejected"]
    assert world.endpoints[3].reason == "100 ms per token, where others need 20 ms"


def test_a_gray_endpoint_is_found_by_its_errors():
    world = World(4)
    for endpoint in world.endpoints:
        answer(world, endpoint, OK, 27)
    for _ in range(3):  # one in ten, never two in a row
        answer(world, world.endpoints[2], FAILED)
        answer(world, world.endpoints[2], OK)
    world.dispatcher.tick()
    assert states(world) == ["ready", "ready", "ejected", "ready"]
    assert world.endpoints[2].reason == "9% of its answers failed in 10 s"


def test_errors_that_everybody_has_eject_nobody():
    world = World(4)
    for endpoint in world.endpoints:
        for _ in range(10):
            answer(world, endpoint, OK)
            answer(world, endpoint, FAILED)
    world.dispatcher.tick()
    assert states(world) == ["ready"] * 4


def test_what_is_long_ago_does_not_count():
    world = World(4)
    for endpoint in world.endpoints:
        slow = endpoint.id == "pod-3"
        answer(world, endpoint, Outcome(AttemptResult.OK, itl_s=0.1 if slow else 0.02), 12)
    world.clock.advance(10.5)
    world.dispatcher.tick()
    assert states(world) == ["ready"] * 4


def test_milliseconds_do_not_eject():
    world = World(4)
    for endpoint in world.endpoints:
        slow = endpoint.id == "pod-3"
        answer(world, endpoint, Outcome(AttemptResult.OK, itl_s=0.004 if slow else 0.001), 12)
    world.dispatcher.tick()
    assert states(world) == ["ready"] * 4


def test_one_that_returns_to_an_established_pool_starts_slowly():
    world = World(3)
    world.clock.advance(60.0)
    first = world.endpoints[0]
    world.registry.report(first, "down")
    world.registry.report(first, "ready")
    assert first.share == 0.1
    world.clock.advance(5.0)
    world.dispatcher.tick()
    assert first.share == pytest.approx(0.5)
    world.clock.advance(5.0)
    world.dispatcher.tick()
    assert first.share == 1.0


def test_those_that_start_together_start_at_once():
    world = World(4)
    assert [endpoint.share for endpoint in world.endpoints] == [1.0] * 4


def test_leases_feed_it():
    world = World(2)
    first = world.endpoints[0]
    for _ in range(5):
        lease = world.place(make_request(("p", 4)), exclude=[world.endpoints[1]])
        assert lease.endpoint is first
        lease.finish(Outcome(AttemptResult.CONNECT_FAILED))
    assert state_of(first) == "ejected"
    assert world.place(make_request(("p", 4))).endpoint is world.endpoints[1]


def test_nothing_is_remembered_of_those_that_are_gone():
    world = World(3)
    for endpoint in world.endpoints:
        answer(world, endpoint, OK)
    gone = world.endpoints
    world.registry.replace("test", [])
    answer(world, gone[0], FAILED)
    world.dispatcher.canary_finished(gone[1], "late")
    assert world.health._records == {}


def test_a_process_that_took_the_place_of_the_ejected_one_is_tested_at_once():
    """Once: who dies again and again waits like everybody."""
    world = World(2)
    endpoint = world.endpoints[0]
    for epoch, is_tested in (("e2", True), ("e3", False)):
        for _ in range(5):
            world.health.note(
                world.registry, endpoint, Outcome(AttemptResult.BROKEN), world.clock()
            )
        assert endpoint.is_ejected
        assert endpoint not in world.dispatcher.tick()
        endpoint.epoch = epoch
        assert (endpoint in world.dispatcher.tick()) is is_tested
        if is_tested:
            world.dispatcher.canary_finished(endpoint, "right")
            assert not endpoint.is_ejected
