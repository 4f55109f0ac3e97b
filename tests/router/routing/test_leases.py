"""Leases: what is reserved is given back once, whatever happens in between."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.outcome import AttemptResult, Outcome
from tests.fakes.endpoints import World, make_request


def counts(world):
    return [(e.in_flight, e.pending_tokens, e.own_tokens) for e in world.endpoints]


def num_paused(world):
    return [e.num_paused for e in world.endpoints]


def is_clean(world):
    underway = world.dispatcher.underway
    assert isinstance(underway, PyUnderway)
    return (
        counts(world) == [(0, 0, 0)] * len(world.endpoints)
        and not any(num_paused(world))
        and not underway._requests
        and not underway._computing
        and underway.num_computing == 0
    )


def test_a_lease_is_released_once_however_often_it_is_finished():
    world = World(2)
    lease = world.place(make_request(("p", 40)))
    other = world.place(make_request(("q", 40)))
    for _ in range(3):
        lease.first_token()
        lease.finish(Outcome(AttemptResult.OK))
        lease.finish()
    assert lease.is_over
    assert sum(e.in_flight for e in world.endpoints) == 1
    other.finish()
    assert is_clean(world)


def test_the_first_token_releases_the_prompt_and_keeps_the_seat():
    world = World(1)
    lease = world.place(make_request(("p", 40)))
    assert counts(world) == [(1, 640, 704)]
    lease.first_token()
    assert counts(world) == [(1, 0, 64)]
    lease.finish()
    assert is_clean(world)


def test_a_paused_request_takes_no_seat_until_its_client_reads_again():
    world = World(1)
    rooms: list[str] = []
    world.dispatcher.on_room = rooms.append
    lease = world.place(make_request(("p", 40)))
    lease.pause()  # its prompt is still computed
    assert (counts(world), num_paused(world)) == ([(1, 640, 704)], [0])
    lease.first_token()
    for _ in range(2):
        lease.pause()
        assert (counts(world), num_paused(world)) == ([(0, 0, 0)], [1])
    assert rooms == ["pool"]
    for _ in range(2):
        lease.resume()
        assert (counts(world), num_paused(world)) == ([(1, 0, 64)], [0])
    lease.pause()
    lease.finish()
    lease.resume()
    assert is_clean(world)


def test_an_answer_in_one_piece_says_that_the_prompt_was_computed():
    world = World(1)
    endpoint = world.endpoints[0]
    endpoint.kind = "openai"  # it does not tell what it holds: the router remembers
    request = make_request(("p", 40))
    world.place(request).finish(Outcome(AttemptResult.BROKEN))
    assert world.dispatcher._index.match(request.keys, [endpoint.slot]) == [0]
    world.place(request).finish(Outcome(AttemptResult.OK, ttft_s=0.1))
    assert world.dispatcher._index.match(request.keys, [endpoint.slot])[0] > 0
    assert is_clean(world)


def test_the_first_finish_is_the_one_that_counts():
    world = World(1)
    seen = []

    class Recorder:
        def placed(self, request, decision):
            seen.append("placed")

        def finished(self, lease, outcome):
            seen.append(outcome.result)

    world.dispatcher.observer = Recorder()
    lease = world.place(make_request(("p", 4)))
    lease.finish(Outcome(AttemptResult.TIMEOUT))
    lease.finish(Outcome(AttemptResult.OK))
    assert seen == ["placed", AttemptResult.TIMEOUT]


def test_nobody_to_place_on_reserves_nothing():
    world = World(2)
    request = make_request(("p", 4))
    assert world.dispatcher.place(request, exclude=world.endpoints) is None
    world.registry.replace("test", [])
    assert world.dispatcher.place(request) is None
    underway = world.dispatcher.underway
    assert isinstance(underway, PyUnderway)
    assert not underway._requests


def test_an_endpoint_that_is_gone_still_gets_its_work_back():
    world = World(2)
    leases = [world.place(make_request((str(i), 30))) for i in range(4)]
    gone = world.endpoints
    world.registry.replace("test", [])
    for lease in leases:
        lease.finish()
    assert [(e.in_flight, e.pending_tokens, e.own_tokens) for e in gone] == [(0, 0, 0)] * 2
    assert is_clean(world)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 5), st.integers(0, 40)),
        st.tuples(st.just("first"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 60), st.sampled_from(list(AttemptResult))),
        st.tuples(st.just("tell"), st.integers(0, 2), st.integers(0, 5000)),
        st.tuples(st.just("wait"), st.integers(1, 8000), st.just(0)),
        st.tuples(st.just("tick"), st.just(0), st.just(0)),
        st.tuples(st.just("down"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("up"), st.integers(0, 2), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(actions)
def test_whatever_happens_the_books_balance_in_the_end(actions):
    world = World(3)
    endpoints = world.endpoints
    leases = []
    for kind, number, value in actions:
        if kind == "place":
            lease = world.dispatcher.place(make_request(("shared", number), (str(value), value)))
            if lease is not None:
                leases.append(lease)
        elif kind == "first" and number < len(leases):
            leases[number].first_token()
        elif kind == "finish" and number < len(leases):
            leases[number].finish(Outcome(value, prompt_tokens=10, output_tokens=3))
        elif kind == "tell":
            world.tell(endpoints[number], queued_tokens=value, running=value % 7)
        elif kind == "wait":
            world.clock.advance(number / 1000)
        elif kind == "tick":
            world.dispatcher.tick()
        elif kind == "down":
            world.registry.report(endpoints[number], "down", "test")
        elif kind == "up":
            world.registry.report(endpoints[number], "ready")
        open_leases = [lease for lease in leases if not lease.is_over]
        assert sum(e.in_flight for e in endpoints) == len(open_leases)
        assert all(e.own_tokens >= 0 and e.pending_tokens >= 0 for e in endpoints)
    for lease in leases:
        lease.finish()
    assert is_clean(world)
