"""The default policy: goes where the prefix is, spreads what would pile up."""

import heapq
from random import Random

import pytest

from octavo_router.routing import prefix_load
from tests.fakes.endpoints import World, make_keys, make_request, spread


def place(world, *parts, **fields):
    return world.place(make_request(*parts, **fields))


def test_goes_where_the_prefix_is():
    world = World(4)
    holder = world.endpoints[2]
    world.hold(holder, make_keys(("system", 20)))
    lease = place(world, ("system", 20), ("question", 4))
    assert lease.endpoint is holder
    assert lease.decision.matched_tokens == 320
    assert lease.decision.policy == "prefix-load"
    assert lease.decision.reason == prefix_load.LOWEST


def test_a_long_queue_outweighs_a_short_prefix():
    world = World(2)
    holder, other = world.endpoints
    world.hold(holder, make_keys(("system", 20)))  # worth 320 tokens
    world.tell(holder, queued_tokens=300)
    assert place(world, ("system", 20)).endpoint is holder
    world.tell(holder, queued_tokens=5000)
    assert place(world, ("system", 20)).endpoint is other


def test_a_slower_engine_needs_a_better_reason():
    world = World(2)
    slow, fast = world.endpoints
    world.hold(slow, make_keys(("system", 8)))
    world.tell(slow, prefill_tokens_per_s=100.0)
    world.tell(fast, prefill_tokens_per_s=1000.0)
    world.dispatcher.tick()
    assert place(world, ("system", 8)).endpoint is slow  # 1 token there is 10 ms
    assert place(world, ("system", 8), ("more", 40)).endpoint is fast


def test_idle_endpoints_take_turns():
    world = World(4)
    picks = []
    for number in range(8):
        lease = place(world, (f"prompt {number}", 4))
        picks.append(lease.endpoint.id)
        lease.finish()
    assert sorted(picks[:4]) == sorted(picks[4:]) == ["pod-0", "pod-1", "pod-2", "pod-3"]


@pytest.mark.parametrize("num_chunks", [0, 1, 20, 500])
def test_a_burst_of_identical_prompts_spreads(num_chunks):
    world = World(8)
    leases = [place(world, ("same", num_chunks)) for _ in range(256)]
    assert spread(world.endpoints) <= 1.25
    for lease in leases:
        lease.finish()


@pytest.mark.parametrize("num_chunks", [20, 500])
def test_a_burst_spreads_although_one_endpoint_holds_it_all(num_chunks):
    world = World(8)
    world.hold(world.endpoints[0], make_keys(("same", num_chunks)))
    for _ in range(256):
        place(world, ("same", num_chunks))
    assert spread(world.endpoints) <= 1.25


def test_a_second_identical_prompt_joins_the_first_one():
    world = World(4)
    first = place(world, ("long", 200))
    second = place(world, ("long", 200))
    assert second.endpoint is first.endpoint
    assert second.decision.matched_tokens == 200 * 16
    first.finish()
    second.finish()
    assert place(world, ("long", 200)).decision.matched_tokens == 0  # nothing was ever stored


def test_a_few_who_share_a_prefix_stay_together():
    world = World(4)
    leases = [place(world, ("agent", 400), (f"call {i}", 2)) for i in range(4)]
    assert {lease.endpoint.id for lease in leases} == {leases[0].endpoint.id}


def test_a_hot_prefix_gets_another_copy():
    world = World(4)
    holder = world.endpoints[0]
    world.hold(holder, make_keys(("hot", 64)))
    leases = [place(world, ("hot", 64), (f"question {i}", 2)) for i in range(32)]
    assert any(lease.decision.reason == prefix_load.COPY for lease in leases)
    assert all(endpoint.in_flight >= 4 for endpoint in world.endpoints)


def test_nobody_runs_away_with_unique_prefixes_that_one_endpoint_holds():
    world = World(8)
    for number in range(256):
        world.hold(world.endpoints[0], make_keys((f"hostile {number}", 500)))
    leases = [place(world, (f"hostile {number}", 500)) for number in range(256)]
    assert spread(world.endpoints) <= 1.5
    assert any(lease.decision.reason == prefix_load.BALANCE for lease in leases)


def test_a_returning_endpoint_gets_a_small_share():
    world = World(4)
    back = world.endpoints[3]
    back.share = 0.1
    for number in range(100):
        place(world, (f"prompt {number}", 4))
    assert back.in_flight == 4  # a tenth of the others' limit: 1.25 * 100 / 3.1
    assert sum(e.in_flight for e in world.endpoints) == 100


def test_it_explains_itself_in_natural_units():
    world = World(2)
    world.hold(world.endpoints[1], make_keys(("system", 20)))
    world.tell(world.endpoints[0], queued_tokens=100)
    details = place(world, ("system", 20), explain=True).decision.details
    assert details["endpoint"] == "pod-1"
    first, second = details["candidates"]
    assert first["uncached_tokens"] == 320
    assert second["uncached_tokens"] == 1
    assert first["reported_work_tokens"] == 100
    assert first["expected_wait_s"] == pytest.approx(420 * 5e-4)


def test_a_prompt_has_no_fewer_tokens_than_an_engine_holds_of_it():
    world = World(1)
    world.hold(world.endpoints[0], make_keys(("system", 20)))
    lease = place(world, ("system", 20), explain=True, prompt_tokens=100)  # estimated
    assert lease.decision.details["prompt_tokens"] == lease.decision.matched_tokens == 320


class Traffic:
    """Closed-loop clients in virtual time: an endpoint computes prompts one after the other, at
    2,000 tokens a second, and decodes for a second each."""

    def __init__(self, world, prompts, *, num_clients):
        self.world = world
        self.prompts = prompts
        self.events = []
        self.free_at = {}
        self.totals = {}
        self.number = 0
        for _ in range(num_clients):
            self.send()

    def send(self):
        world, now = self.world, self.world.clock.now
        self.number += 1
        parts = self.prompts(self.number)
        request = make_request(*parts)
        endpoint_matched = None
        lease = world.place(request)
        endpoint = lease.endpoint
        endpoint_matched = world.index.match(request.keys, [endpoint.slot])[0]
        compute_s = max(1, request.prompt_tokens - endpoint_matched) / 2000
        at = self.free_at[endpoint.id] = max(now, self.free_at.get(endpoint.id, now)) + compute_s
        self.totals[endpoint.id] = self.totals.get(endpoint.id, 0) + 1
        heapq.heappush(self.events, (at, self.number, "first", lease, request))
        heapq.heappush(self.events, (at + 1.0, self.number, "end", lease, request))

    def run(self, num_requests):
        end = self.number + num_requests
        while self.number < end:
            self.world.clock.now, _, kind, lease, request = heapq.heappop(self.events)
            if kind == "first":
                self.world.hold(lease.endpoint, request.keys)
                lease.first_token()
            else:
                lease.finish()
                self.send()
        return self.totals

    def imbalance(self):
        counts = [self.totals.get(e.id, 0) for e in self.world.endpoints]
        return max(counts) / (sum(counts) / len(counts))


def test_a_hot_prefix_of_nine_in_ten_requests_is_shared_out():
    rng = Random(3)

    def prompts(number):
        if rng.random() < 0.9:
            return ("hot", 128), (f"q{number}", 4)
        return ((f"unique {number}", 64),)

    traffic = Traffic(World(8), prompts, num_clients=64)
    traffic.run(1500)
    assert traffic.imbalance() <= 1.5


def test_a_cold_endpoint_gets_its_part_within_a_minute():
    rng = Random(5)
    turns: dict[str, int] = {}

    def prompts(number):
        # Conversations: most requests continue one, some begin a new one under a common prompt.
        if turns and rng.random() < 0.85:
            name = rng.choice(list(turns))
            turns[name] += 1
        else:
            name = f"talk {number}"
            turns[name] = 1
        if turns[name] > 6:
            del turns[name]
            return ("system", 32), (name, 24)
        return ("system", 32), (name, 4 * turns[name])

    world = World(8)
    traffic = Traffic(world, prompts, num_clients=64)
    traffic.run(1500)
    cold = world.add(1)[0]
    began = world.clock.now
    cold.share = 1.0
    traffic.totals.clear()
    while world.clock.now < began + 60.0:
        traffic.run(50)
    fair = sum(traffic.totals.values()) / 9
    assert 0.5 * fair <= traffic.totals[cold.id] <= 1.5 * fair


def test_without_any_signal_it_is_fair_by_its_own_books():
    world = World(4)
    for number in range(100):
        place(world, (f"prompt {number}", 10 + number % 3))
    assert spread(world.endpoints) <= 1.1
