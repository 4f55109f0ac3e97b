"""What a replica tells the operator, and to whom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo_engine.protocol.state import TTFT_BOUNDS_S, State
from octavo_router.admin.state import StateReporter
from octavo_router.errors import Rejected
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionDemand
from octavo_router.http.messages import Headers, Inbound
from octavo_router.metrics import RequestRecord, RouterMetrics
from tests.fakes.endpoints import World


def reporter(world: World, metrics: RouterMetrics, **more) -> StateReporter:
    demands = {"pool": AdmissionDemand(0, 2, 64), "asleep": AdmissionDemand(3, 0, 30)}
    known: dict[str, Any] = {
        "admin": AdminAccess(),
        "epoch": "e1",
        "known_pools": lambda: ["asleep"],
    }
    return StateReporter(
        world.registry,
        lambda pool: demands.get(pool, AdmissionDemand(0, 0, 0)),
        metrics,
        replica="router-0",
        **(known | more),
    )


def ask(report: StateReporter, authorization: str = "", client: str = "127.0.0.1") -> State:
    raw = [(b"authorization", authorization.encode())] if authorization else []
    reply = report(Inbound("GET", "/octavo/v1/state", headers=Headers(raw), client=client))
    assert isinstance(reply.body, bytes)
    return msgspec.json.decode(reply.body, type=State)


def test_endpoints_pools_and_revisions():
    world = World(1)
    metrics = RouterMetrics(now=world.clock)
    (endpoint,) = world.endpoints
    endpoint.in_flight = 2
    world.tell(endpoint, running=3, waiting=1, queued_tokens=99, kv_usage=0.25)
    metrics.finish(
        RequestRecord(
            pool="other", revision="r1", status=200, attempts=1, ttft_s=0.3, last_token_s=0.5,
            output_tokens=5,
        )
    )  # fmt: skip
    world.clock.advance(7.0)
    state = ask(reporter(world, metrics))
    assert (state.epoch, state.replica) == ("e1", "router-0")
    (reported,) = state.endpoints
    assert (reported.id, reported.state, reported.url) == (
        endpoint.id,
        "ready",
        "http://10.0.0.1:8000",
    )
    assert (reported.in_flight, reported.running, reported.waiting) == (2, 3, 1)
    assert (reported.queued_tokens, reported.kv_usage) == (99, 0.25)
    pools = {pool.pool: pool for pool in state.pools}
    assert set(pools) == {"asleep", "other", "pool"}
    assert (pools["pool"].queued, pools["pool"].queued_tokens, pools["pool"].in_flight) == (
        2,
        64,
        2,
    )
    assert pools["pool"].last_request_age_s == 0.0  # somebody waits
    assert pools["asleep"].held == 3
    assert pools["other"].last_request_age_s == 7.0
    (revision,) = pools["other"].revisions
    assert (revision.requests, revision.errors, revision.ttft_count) == (1, 0, 1)
    assert (revision.itl_count, round(revision.itl_s_sum, 9)) == (4, 0.2)
    assert len(revision.ttft_buckets) == len(TTFT_BOUNDS_S) + 1
    assert revision.ttft_buckets[:4] == [0, 0, 0, 1]  # at or below 0.4 s
    assert revision.ttft_buckets[-1] == 1


def test_what_the_operator_needs_to_move_engines_between_sides():
    world = World(1)
    (endpoint,) = world.endpoints
    endpoint.token_s = 4e-5
    world.tell(endpoint, step_s=0.011, computed_tokens=6000)
    state = ask(reporter(world, RouterMetrics(), prompt_tokens=lambda pool: float(len(pool))))
    (reported,) = state.endpoints
    assert (reported.step_s, reported.computed_tokens, reported.prompt_token_s) == (
        0.011, 6000, 4e-5,
    )  # fmt: skip
    assert {pool.pool: pool.prompt_tokens for pool in state.pools} == {"asleep": 6.0, "pool": 4.0}


def test_a_pool_that_nobody_asked_for_has_no_last_request():
    state = ask(reporter(World(0), RouterMetrics(), known_pools=lambda: ["new"]))
    assert [(pool.pool, pool.last_request_age_s) for pool in state.pools] == [("new", None)]


def test_without_a_token_only_this_machine_is_told():
    report = reporter(World(0), RouterMetrics())
    ask(report)
    with pytest.raises(Rejected) as refused:
        ask(report, "Bearer user", client="10.0.0.1")
    assert (refused.value.status, refused.value.code) == (403, "admin_key_required")


def test_unless_it_is_open_by_its_settings():
    report = reporter(World(0), RouterMetrics(), is_open=True)
    ask(report, client="10.0.0.1")


def test_an_admin_key_opens_it_and_closes_it_to_this_machine():
    report = reporter(World(0), RouterMetrics(), admin=AdminAccess("admin"))
    ask(report, "Bearer admin", client="10.0.0.1")
    for client in ("10.0.0.1", "127.0.0.1"):
        with pytest.raises(Rejected):
            ask(report, client=client)


@pytest.mark.parametrize("shown", ["", "Bearer user", "Bearer secre", "secret", "Bearer s\u00e9"])
def test_with_a_token_only_the_token_does(shown):
    report = reporter(World(0), RouterMetrics(), token="secret", is_open=True)
    ask(report, "Bearer secret", client="10.0.0.1")
    with pytest.raises(Rejected) as refused:
        ask(report, shown)
    assert refused.value.status == 401
