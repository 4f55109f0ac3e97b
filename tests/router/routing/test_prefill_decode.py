"""Which prompts are computed away from their answers, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import PoolConfig, RouterConfig, RoutingConfig
from octavo_router.routing.outcome import AttemptResult, Outcome
from tests.fakes.endpoints import World, make_keys, make_request

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint

PAIRED = RouterConfig(routing=RoutingConfig(policy="prefill-decode", prefill_min_tokens=256))


def paired(
    num_prefill: int = 2, *, config: RouterConfig = PAIRED, **fields: Any
) -> tuple[World, Endpoint, list[Endpoint]]:
    """One engine that answers, and those that compute prompts."""
    world = World(0, config=config)
    (decode,) = world.add(1, kind="openai")
    return world, decode, world.add(num_prefill, kind="openai", role="prefill", **fields)


def test_only_engines_that_answer_are_placed_on():
    world, decode, _ = paired()
    for _ in range(5):
        lease = world.place(make_request())
        assert lease.endpoint is decode
        assert lease.decision.policy == "prefill-decode"


@pytest.mark.parametrize(("num_tokens", "is_wanted"), [(255, False), (256, True), (4000, True)])
def test_a_prompt_is_worth_the_way_from_so_many_tokens_on(num_tokens: int, is_wanted: bool):
    world, _, _ = paired()
    lease = world.place(make_request(prompt_tokens=num_tokens))
    assert world.dispatcher.wants_prompt(lease) is is_wanted


def test_what_the_answering_engine_has_need_not_be_computed():
    world, decode, _ = paired()
    keys = make_keys(("a", 40))
    world.hold(decode, make_keys(("a", 30)))
    lease = world.place(make_request(keys=keys, prompt_tokens=640))
    assert lease.decision.matched_tokens == 480
    assert not world.dispatcher.wants_prompt(lease)


def test_a_prompt_is_reserved_where_it_is_computed_until_it_is():
    world, decode, (left, right) = paired()
    lease = world.place(make_request(prompt_tokens=1000))
    prompt = world.dispatcher.place_prompt(lease)
    assert prompt is not None
    assert prompt.endpoint is left
    assert (left.pending_tokens, left.in_flight) == (1000, 1)
    other = world.dispatcher.place_prompt(world.place(make_request(prompt_tokens=1000)))
    assert other is not None
    assert other.endpoint is right  # the first has work
    for one in (prompt, other):
        one.finish(Outcome(AttemptResult.OK, 0.1, 0.1))
    assert [(e.pending_tokens, e.in_flight) for e in (left, right)] == [(0, 0), (0, 0)]
    lease.first_token()
    assert decode.pending_tokens == 1000  # the other one's


def test_prompts_go_where_their_prefix_was_computed():
    world, _, (left, _) = paired()
    keys = make_keys(("a", 100))
    for _ in range(3):
        lease = world.place(make_request(keys=keys, prompt_tokens=1600))
        prompt = world.dispatcher.place_prompt(lease)
        assert prompt is not None
        assert prompt.endpoint is left
        prompt.finish(Outcome(AttemptResult.OK, 0.1, 0.1))
        lease.finish()


@pytest.mark.parametrize(
    "fact", ["not ready", "another revision", "our own engine", "another kind", "nobody"]
)
def test_who_cannot_hand_over_is_not_asked(fact: str):
    world, decode, prefill = paired(0 if fact == "nobody" else 1)
    if fact == "not ready":
        world.registry.report(prefill[0], "down", "it is gone")
    if fact == "our own engine":  # it keeps its cache to itself
        decode.kind = prefill[0].kind = "octavo"
        world.registry.changed(prefill[0])
    if fact == "another kind":
        prefill[0].kind, prefill[0].kv_role = "octavo", "kv_producer"
        world.registry.changed(prefill[0])
    request = make_request(prompt_tokens=1000)
    lease = world.place(request)
    if fact == "another revision":
        request.revision = "r2"
    assert world.dispatcher.place_prompt(lease) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "is_pair"),
    [("r1", "r1", True), ("r1", "r2", False), ("", "r2", True), ("r1", "", True)],
)
def test_a_prompt_is_computed_by_the_revision_that_answers(ours: str, theirs: str, is_pair: bool):
    """While a rollout runs: blocks of another revision would be refused after the work."""
    world = World(0, config=PAIRED)
    world.add(1, kind="openai", revision=ours)
    world.add(1, kind="openai", role="prefill", revision=theirs)
    lease = world.place(make_request(prompt_tokens=1000))
    assert (world.dispatcher.place_prompt(lease) is not None) is is_pair


def test_a_prompt_for_an_adapter_is_computed_where_that_is_loaded():
    world, decode, (_, right) = paired()
    for engine in (decode, right):
        engine.adapters = frozenset({"law"})
    request = make_request(prompt_tokens=1000)
    request.adapter = "law"
    lease = world.place(request)
    prompt = world.dispatcher.place_prompt(lease)
    assert prompt is not None
    assert prompt.endpoint is right
    right.adapters = frozenset()
    assert world.dispatcher.place_prompt(lease) is None


@pytest.mark.parametrize(
    ("role", "fetches"),
    [("", False), ("kv_producer", False), ("kv_consumer", True), ("kv_both", True)],
)
def test_our_own_engines_fetch_prompts_as_their_role_says(role: str, fetches: bool):
    world, decode, prefill = paired()
    for engine, its_role in ((decode, role), (prefill[0], "kv_producer")):
        engine.kind, engine.kv_role = "octavo", its_role
        world.registry.changed(engine)
    lease = world.place(make_request(prompt_tokens=1000))
    assert world.dispatcher.wants_prompt(lease) is fetches
    prompt = world.dispatcher.place_prompt(lease)
    assert prompt is not None
    assert prompt.endpoint is prefill[0]


def test_other_pools_have_other_policies():
    routing = replace(
        PAIRED.routing, policy="prefix-load",
        pools=(PoolConfig(name="pool", policy="prefill-decode"),),
    )  # fmt: skip
    world, _, _ = paired(config=RouterConfig(routing=routing))
    assert world.dispatcher.pairs("pool")
    assert not world.dispatcher.pairs("other")
