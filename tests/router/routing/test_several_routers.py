"""Routers that know nothing of each other: what engines tell is enough to share them evenly."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.fakes.endpoints import World, make_request

NUM_ROUTERS, NUM_ENGINES, NUM_REQUESTS = 4, 8, 512


@pytest.mark.parametrize("told_every", [8, 64, 10**9])
@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (6, 2, 1, 1)], ids=["even", "uneven"])
@pytest.mark.parametrize("prompts", ["identical", "unique", "conversations"])
def test_nobody_gets_more_than_half_as_much_again_as_the_others(prompts, shares, told_every):
    """Load is told late, or never: then each router has what it sent itself."""
    rng = Random(7)
    routers = [World(NUM_ENGINES, seed=number) for number in range(NUM_ROUTERS)]
    totals: Counter[str] = Counter({endpoint.id: 0 for endpoint in routers[0].endpoints})
    leases = []
    for number in range(NUM_REQUESTS):
        [router] = rng.choices(routers, weights=shares)
        match prompts:
            case "identical":
                parts = [("same", 20)]
            case "unique":
                parts = [(f"prompt {number}", rng.randrange(4, 40))]
            case _:
                parts = [("system", 20), (f"user {rng.randrange(32)}", 10), (f"turn {number}", 2)]
        lease = router.place(make_request(*parts))
        totals[lease.endpoint.id] += 1
        leases.append((router, lease))
        if number % told_every == told_every - 1:
            for other in routers:
                other.clock.advance(0.1)
                for endpoint in other.endpoints:
                    running = totals[endpoint.id]
                    other.tell(endpoint, running=running, queued_tokens=64 * running)
        if number >= 128:
            mean = sum(totals.values()) / NUM_ENGINES
            assert max(totals.values()) <= 1.5 * mean + 4, (number, totals)
        while len(leases) > 256:  # the oldest are over
            router, lease = leases.pop(rng.randrange(64))
            lease.finish()
            totals[lease.endpoint.id] -= 1


def test_the_ones_that_are_left_share_what_a_lost_router_had():
    rng = Random(3)
    routers = [World(NUM_ENGINES, seed=number) for number in range(NUM_ROUTERS)]
    totals: Counter[str] = Counter()
    for number in range(NUM_REQUESTS):
        alive = routers if number < NUM_REQUESTS // 2 else routers[1:]
        lease = rng.choice(alive).place(make_request((f"prompt {number}", 8)))
        totals[lease.endpoint.id] += 1
    assert max(totals.values()) <= 1.25 * NUM_REQUESTS / NUM_ENGINES
