"""What can be seen of decisions: explanations, a ring of samples, shadows and their regret."""

import json

import pytest

from octavo_router.config.settings import RouterConfig, RoutingConfig
from octavo_router.routing.outcome import AttemptResult, Outcome
from tests.fakes.endpoints import World, make_keys, make_request


def test_nothing_is_kept_unless_asked_for_or_sampled():
    world = World(2, config=RouterConfig(routing=RoutingConfig(sample_every=4, num_decisions=3)))
    leases = [world.place(make_request((str(n), 4))) for n in range(8)]
    assert [lease.decision.details is not None for lease in leases] == [
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    world.place(make_request(("x", 4), explain=True))
    assert len(world.dispatcher.decisions) == 3
    for number in range(40):
        world.place(make_request((str(number), 4)))
    assert len(world.dispatcher.decisions) == 3


@pytest.mark.parametrize(
    "policy",
    ["prefix-load", "least-load", "round-robin", "random", "power-of-two", "consistent-hash",
     "session", "lora-affinity"],
)  # fmt: skip
def test_every_policy_explains_itself_in_json(policy):
    world = World(3, config=RouterConfig(routing=RoutingConfig(policy=policy)))
    request = make_request(("p", 4), explain=True, request_id="r-1", session="s", adapter="a")
    decision = world.place(request).decision
    details = json.loads(json.dumps(decision.details))
    assert details["policy"] == policy
    assert details["endpoint"] == decision.endpoint.id
    assert details["reason"]
    assert details["request_id"] == "r-1"
    assert len(details["candidates"]) == 3
    own = set(details["candidates"][0]) - set(world_facts())
    assert own, "a policy shows the numbers that it decides by"


def world_facts():
    return (
        "endpoint", "matched_tokens", "in_flight", "running", "waiting", "queued_tokens",
        "kv_usage", "is_saturated",
    )  # fmt: skip


def test_explaining_does_not_change_the_next_pick():
    plain = World(4, config=RouterConfig(routing=RoutingConfig(policy="round-robin")))
    requested = World(4, config=RouterConfig(routing=RoutingConfig(policy="round-robin")))
    one = [plain.place(make_request(("p", 4))).endpoint.id for _ in range(6)]
    two = [requested.place(make_request(("p", 4), explain=True)).endpoint.id for _ in range(6)]
    assert one == two


def shadows_of(world):
    assert world.dispatcher.shadows is not None
    return world.dispatcher.shadows


def test_a_shadow_is_compared_and_never_followed():
    config = RouterConfig(
        routing=RoutingConfig(policy="least-load", shadows=("prefix-load",), sample_every=1)
    )
    world = World(2, config=config)
    holder, other = world.endpoints
    world.hold(holder, make_keys(("system", 20)))
    world.tell(holder, queued_tokens=100)
    world.tell(other)
    world.dispatcher.tick()
    lease = world.place(make_request(("system", 20)))
    assert lease.endpoint is other
    (row,) = shadows_of(world).report()
    live_s, shadow_s = 5e-4 * 1.5 * 320, 5e-4 * (100 + 1.5)
    assert row == {
        "live": "least-load",
        "shadow": "prefix-load",
        "num_requests": 1,
        "num_agreed": 0,
        "num_better": 1,
        "num_worse": 0,
        "regret_s_sum": pytest.approx(live_s - shadow_s),
        "matched_tokens_live": 0,
        "matched_tokens_shadow": 320,
    }
    assert holder.in_flight == 0


def test_a_policy_is_not_its_own_shadow():
    config = RouterConfig(routing=RoutingConfig(shadows=("prefix-load", "random"), sample_every=1))
    world = World(3, config=config)
    for number in range(5):
        world.place(make_request((str(number), 4)))
    assert [row["shadow"] for row in shadows_of(world).report()] == ["random"]


def test_plain_servers_are_remembered_by_what_they_were_sent():
    world = World(0)
    plain = world.add(2, kind="openai")
    request = make_request(("system", 20))
    first = world.place(request)
    first.first_token()
    first.finish(Outcome(AttemptResult.OK))
    again = world.place(make_request(("system", 20)))
    assert again.endpoint is first.endpoint
    assert again.decision.matched_tokens == 320
    assert plain


def test_engines_that_tell_are_believed_instead():
    world = World(2)
    lease = world.place(make_request(("system", 20)))
    lease.first_token()
    lease.finish()
    assert world.place(make_request(("system", 20))).decision.matched_tokens == 0


def test_prompt_lengths_are_learnt_from_what_engines_report():
    world = World(1)
    request = make_request(("p", 100), prompt_tokens=0)
    lease = world.place(request)
    assert request.prompt_tokens == 1 + 1600  # a token for four bytes, until something is known
    lease.finish(Outcome(AttemptResult.OK, prompt_tokens=3200))
    request = make_request(("q", 100), prompt_tokens=0)
    world.place(request)
    assert request.prompt_tokens == 1 + 3200


def test_room_is_told_when_a_request_ends_and_when_an_engine_comes():
    world = World(1)
    reported: list[str] = []
    world.dispatcher.on_room = reported.append
    world.place(make_request(("p", 4))).finish()
    assert reported == ["pool"]
    world.add(1)
    assert reported == ["pool", "pool"]
