"""The gate: who comes in, who waits, who goes next, and who is told to come back later."""

import asyncio
import math
from hashlib import sha256
from random import Random

import pytest

from octavo_router.config.settings import FlowConfig, KeyConfig, RetryConfig
from octavo_router.errors import Rejected
from octavo_router.flow.admission import AdmissionDemand, AdmissionGate, QueuedRequest, Ticket
from octavo_router.flow.budget import Throttle
from octavo_router.flow.keys import KeyTable, make_table
from octavo_router.routing.outcome import AttemptResult
from tests.fakes.clock import ManualClock
from tests.fakes.endpoints import make_request


class FakeRooms:
    """So many seats; a ticket takes one when its request is placed."""

    def __init__(self, seats):
        self.seats = seats
        self.empty = False

    def has_room(self, pool, revision):
        return self.seats > 0

    def room(self, pool, revision):
        return max(self.seats, 0)

    def is_empty(self, pool, revision):
        return self.empty


class World:
    def __init__(self, seats=0, *, keys=(), **flow):
        self.clock = ManualClock()
        self.rooms = FakeRooms(seats)
        self.config = FlowConfig(**flow)
        self.gate = AdmissionGate(self.config, make_table(keys, {}), self.rooms, self.clock)
        self.placed = []

    def admit(
        self, name="r", *, authorization="", hint="", deadline=math.inf, num_bytes=0, **fields
    ):
        tenant = self.gate.authenticate(authorization, hint)
        request = make_request((name, 4), request_id=name, **fields)
        return self.gate.admit(request, tenant, deadline=deadline, num_bytes=num_bytes)

    async def go(self, name="r", **fields):
        entry = self.admit(name, **fields)
        ticket = entry if isinstance(entry, Ticket) else await entry
        self.rooms.seats -= 1  # what placing does
        self.placed.append(name)
        return ticket


async def settle():
    for _ in range(3):
        await asyncio.sleep(0)


def refusal(call):
    with pytest.raises(Rejected) as caught:
        call()
    return caught.value.status, caught.value.code, caught.value.retry_after_s


def run(coroutine):
    return asyncio.run(coroutine)


def test_with_room_everybody_passes():
    world = World(seats=3)
    assert isinstance(world.admit(), Ticket)
    assert world.gate.demand("pool") == AdmissionDemand(0, 0, 0)


def test_a_full_pool_makes_requests_wait_and_room_lets_exactly_as_many_go():
    async def story():
        world = World(seats=0)
        tasks = [asyncio.create_task(world.go(f"r{i}")) for i in range(5)]
        await settle()
        assert world.gate.demand("pool").queued == 5
        assert world.gate.demand("pool").held == 0
        world.rooms.seats = 2
        world.gate.wake("pool")
        world.gate.wake("pool")  # those called are not placed yet: nobody else may go
        await settle()
        assert world.placed == ["r0", "r1"]
        world.rooms.seats += 1
        world.gate.wake("elsewhere")
        await settle()
        assert world.placed == ["r0", "r1"]
        world.gate.tick()
        await settle()
        assert world.placed == ["r0", "r1", "r2"]
        world.rooms.seats = 9
        world.gate.wake("pool")
        await asyncio.gather(*tasks)
        assert world.placed == [f"r{i}" for i in range(5)]
        assert world.gate._queues == {}
        assert world.gate._called == {}

    run(story())


def test_nobody_overtakes_those_who_wait():
    async def story():
        world = World(seats=0)
        first = asyncio.create_task(world.go("first"))
        await settle()
        world.rooms.seats = 1
        second = asyncio.create_task(world.go("second"))  # came when there was room
        await settle()
        assert world.placed == []
        world.gate.tick()
        await settle()
        assert world.placed == ["first"]
        world.rooms.seats = 1
        world.gate.wake("pool")
        await asyncio.gather(first, second)

    run(story())


def test_one_that_leaves_makes_no_hole():
    async def story():
        world = World(seats=0)
        tasks = [asyncio.create_task(world.go(f"r{i}")) for i in range(3)]
        await settle()
        tasks[0].cancel()
        await settle()
        assert world.gate.demand("pool").queued == 2
        world.rooms.seats = 1
        world.gate.wake("pool")
        await settle()
        assert world.placed == ["r1"]
        tasks[2].cancel()
        await settle()
        assert world.gate._queues == {}

    run(story())


def test_one_that_is_cancelled_just_as_its_turn_comes_hands_it_on():
    async def story():
        world = World(seats=0)
        tasks = [asyncio.create_task(world.go(f"r{i}")) for i in range(2)]
        await settle()
        world.rooms.seats = 1
        world.gate.wake("pool")
        tasks[0].cancel()  # called, not resumed yet
        await settle()
        assert world.placed == ["r1"]
        assert tasks[0].cancelled()
        assert world.gate._called == {}

    run(story())


def test_one_that_was_cancelled_before_its_turn_came_takes_no_room():
    async def story():
        world = World(seats=0)
        tasks = [asyncio.create_task(world.go(f"r{i}")) for i in range(2)]
        await settle()
        tasks[0].cancel()  # its future is cancelled, its task has not run
        world.rooms.seats = 1
        world.gate.wake("pool")
        await settle()
        assert world.placed == ["r1"]
        assert world.gate._called == {}

    run(story())


def test_waiting_without_awaiting_can_be_given_up():
    async def story():
        world = World(seats=0, keys=(KeyConfig(tenant="t", key="k", max_in_flight=1),))
        entry = world.admit(authorization="Bearer k")
        assert isinstance(entry, QueuedRequest)
        done, _ = await asyncio.wait([entry.future], timeout=0)
        assert not done
        entry.cancel()
        entry.cancel()
        assert world.gate._queues == {}
        world.rooms.seats = 1
        assert isinstance(world.admit(authorization="Bearer k"), Ticket)  # the count was given back

    run(story())


def test_the_queue_is_bounded_by_count():
    async def story():
        world = World(seats=0, max_queue=2)
        waiting = [world.admit() for _ in range(2)]
        status, code, retry_after_s = refusal(world.admit)
        assert (status, code) == (503, "queue_full")
        assert retry_after_s == pytest.approx(2.0)
        for entry in waiting:
            entry.cancel()

    run(story())


def test_the_queue_is_bounded_by_bytes():
    async def story():
        world = World(seats=0, max_queue_bytes=1000)
        entry = world.admit(num_bytes=900)
        assert refusal(lambda: world.admit(num_bytes=101))[:2] == (503, "queue_full")
        other = world.admit(num_bytes=100)
        entry.cancel()
        other.cancel()

    run(story())


def test_the_queue_is_bounded_by_age():
    async def story():
        world = World(seats=0, queue_timeout_s=30.0)
        task = asyncio.create_task(world.go())
        await settle()
        world.clock.advance(29.9)
        world.gate.tick()
        await settle()
        assert not task.done()
        world.clock.advance(0.2)
        world.gate.tick()
        with pytest.raises(Rejected) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
        assert caught.value.retry_after_s is not None
        assert world.gate._queues == {}

    run(story())


def test_a_deadline_ends_the_wait_earlier():
    async def story():
        world = World(seats=0)
        task = asyncio.create_task(world.go(deadline=world.clock() + 5.0))
        await settle()
        world.clock.advance(5.0)
        world.gate.tick()
        with pytest.raises(Rejected) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
        assert refusal(lambda: world.admit(deadline=world.clock()))[:2] == (
            504,
            "deadline_exceeded",
        )

    run(story())


def test_a_pool_without_engines_holds_requests_until_one_comes():
    async def story():
        world = World(seats=0, hold_timeout_s=60.0)
        world.rooms.empty = True
        entry = world.admit("held")
        assert entry.is_held
        task = asyncio.create_task(world.go("second"))
        await settle()
        assert world.gate.demand("pool").held == 2
        assert entry.num_ahead == 0
        world.clock.advance(50.0)
        world.gate.tick()
        world.rooms.empty, world.rooms.seats = False, 8
        world.gate.wake("pool")
        ticket = await entry
        assert ticket.waited_s == 50.0
        await task

    run(story())


def test_nobody_came():
    async def story():
        world = World(seats=0, hold_timeout_s=60.0)
        world.rooms.empty = True
        task = asyncio.create_task(world.go())
        await settle()
        world.clock.advance(60.0)
        world.gate.tick()
        with pytest.raises(Rejected) as caught:
            await task
        assert (caught.value.status, caught.value.code) == (503, "no_endpoints")
        assert caught.value.retry_after_s == 10.0

    run(story())


def test_revisions_have_queues_of_their_own():
    async def story():
        world = World(seats=0)
        one, two = world.admit(revision="r1"), world.admit(revision="r2")
        assert len(world.gate._queues) == 2
        assert world.gate.demand("pool").queued == 2
        one.cancel()
        two.cancel()

    run(story())


def test_a_flooding_tenant_waits_behind_itself():
    async def story():
        world = World(seats=0)
        flood = [asyncio.create_task(world.go(f"flood{i}", hint="flood")) for i in range(50)]
        await settle()
        polite = [asyncio.create_task(world.go(f"polite{i}", hint="polite")) for i in range(3)]
        await settle()
        for _ in range(6):
            world.rooms.seats = 1
            world.gate.wake("pool")
            await settle()
        assert sum(name.startswith("polite") for name in world.placed) == 3
        for task in flood + polite:
            task.cancel()
        await settle()

    run(story())


def test_a_pool_that_refuses_nearly_everything_is_asked_less():
    world = World(seats=10)
    throttle = world.gate.throttle = Throttle(RetryConfig(), world.clock, Random(1))
    for _ in range(1000):
        throttle.note("pool", AttemptResult.REFUSED)
    world.gate.tick()
    refusals = []
    for _ in range(200):
        try:
            world.admit()
        except Rejected as error:
            refusals.append((error.status, error.code))
    assert set(refusals) == {(503, "overloaded")}
    assert len(refusals) > 190


# keys


KEYS = (
    KeyConfig(tenant="alice", key="alice-key"),
    KeyConfig(tenant="bob", sha256=sha256(b"bob-key").hexdigest()),
)


def test_a_key_names_its_tenant():
    world = World(seats=1, keys=KEYS)
    assert world.gate.authenticate("Bearer alice-key").name == "alice"
    assert world.gate.authenticate("bearer  bob-key ").name == "bob"
    assert world.gate.authenticate("bob-key").name == "bob"


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        ("Bearer wrong", "invalid_api_key"),
        ("Basic alice-key", "invalid_api_key"),
        ("Bearer alice-key2", "invalid_api_key"),
        ("Bearer \udcff\udc00", "invalid_api_key"),
        ("Bearer " + sha256(b"bob-key").hexdigest(), "invalid_api_key"),
    ],
)
def test_anything_else_is_nobody(authorization, code):
    world = World(seats=1, keys=KEYS)
    assert refusal(lambda: world.gate.authenticate(authorization))[:2] == (401, code)


def test_the_keys_themselves_are_kept_nowhere():
    world = World(seats=1, keys=KEYS)
    table = world.gate.tenants.table
    assert set(table.limits) == {sha256(b"alice-key").digest(), sha256(b"bob-key").digest()}
    assert "alice-key" not in repr(table)


def test_a_revoked_key_stops_and_the_others_keep_what_they_have_used():
    world = World(seats=99, keys=(*KEYS, KeyConfig(tenant="c", key="c", max_in_flight=1)))
    alice = world.gate.authenticate("alice-key")
    world.admit(authorization="c")
    world.gate.replace_keys(make_table((KeyConfig(tenant="c", key="c", max_in_flight=1),), {}))
    assert alice.is_revoked
    assert refusal(lambda: world.gate.authenticate("alice-key"))[:2] == (401, "invalid_api_key")
    assert refusal(lambda: world.admit(authorization="c"))[:2] == (429, "too_many_in_flight")


def test_a_table_without_keys_that_is_required_lets_nobody_in():
    world = World(seats=1)
    world.gate.replace_keys(KeyTable({}, is_required=True))
    assert refusal(lambda: world.gate.authenticate("anything"))[:2] == (401, "invalid_api_key")


def test_nameless_tenants_are_bounded():
    world = World(seats=1)
    names = {world.gate.authenticate("", f"flow-{i}").name for i in range(3000)}
    assert len(names) <= 1001
    assert "other" in names


# limits of a key


def keyed(**limits):
    return World(seats=10**6, keys=(KeyConfig(tenant="t", key="k", **limits),))


def test_requests_per_second():
    world = keyed(requests_per_s=2.0)
    for _ in range(2):
        world.admit(authorization="k")
    assert refusal(lambda: world.admit(authorization="k")) == (429, "request_rate_exceeded", 0.5)
    world.clock.advance(0.5)
    world.admit(authorization="k")


def test_tokens_per_minute_are_charged_before_and_settled_after():
    world = keyed(tokens_per_min=600.0)
    ticket = world.admit(authorization="k")  # 64 prompt and at most 64 output tokens
    assert ticket.tenant.tokens.level(world.clock()) == 600.0 - 128
    ticket.release(prompt_tokens=64, output_tokens=6)
    assert ticket.tenant.tokens.level(world.clock()) == 600.0 - 70
    ticket.release(prompt_tokens=64, output_tokens=6)
    assert ticket.tenant.tokens.level(world.clock()) == 600.0 - 70
    for _ in range(4):
        world.admit(authorization="k")
    status, code, retry_after_s = refusal(lambda: world.admit(authorization="k"))
    assert (status, code) == (429, "token_rate_exceeded")
    assert retry_after_s == pytest.approx((128 - (600 - 70 - 4 * 128)) / 10)


def test_requests_in_flight():
    world = keyed(max_in_flight=2)
    first, _ = world.admit(authorization="k"), world.admit(authorization="k")
    assert refusal(lambda: world.admit(authorization="k")) == (429, "too_many_in_flight", 1.0)
    first.release()
    world.admit(authorization="k")


def test_models_that_a_key_may_use():
    world = keyed(models=("model",))
    world.admit(authorization="k")
    assert refusal(lambda: world.admit(authorization="k", model="other")) == (
        403,
        "model_not_allowed",
        None,
    )


def test_a_refused_request_has_used_nothing():
    async def story():
        world = keyed(requests_per_s=5.0, tokens_per_min=600.0, max_in_flight=5)
        world.rooms.seats = 0
        world.gate.config = FlowConfig(max_queue=0)
        assert refusal(lambda: world.admit(authorization="k"))[:2] == (503, "queue_full")
        tenant = world.gate.authenticate("k")
        assert tenant.in_flight == 0
        assert tenant.tokens.level(world.clock()) == 600.0

    run(story())


def test_many_answers_cost_many_times():
    world = keyed(tokens_per_min=6000.0)
    ticket = world.admit(authorization="k", num_answers=4)
    assert ticket.estimated_tokens == 64 + 4 * 64


def test_a_huge_max_tokens_is_not_believed():
    world = keyed(tokens_per_min=6000.0)
    assert world.admit(authorization="k", max_tokens=10**6).estimated_tokens == 64 + 256
