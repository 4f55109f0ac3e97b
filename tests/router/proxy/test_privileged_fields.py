"""What only a trusted key may tell an engine, and whose cached prompts answer a tenant."""

from __future__ import annotations

import json

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import KeyTable, make_table
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream

PRIVILEGED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"},
    "ec_transfer_params": {"a": 1},
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 8998,
    "bootstrap_room": 7,
    "data_parallel_rank": 3,
    "routed_dp_rank": 1,
    "disagg_prefill_dp_rank": 2,
}
KEYS = (
    KeyConfig(tenant="a", key="key-a"),
    KeyConfig(tenant="b", key="key-b"),
    KeyConfig(tenant="ours", key="key-ours", trusted=True),
)


def table(scope: str = "shared") -> KeyTable:
    return make_table(KEYS, {}, salts_caches=scope == "tenant")


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}\r\n" if key else ""


@pytest.mark.parametrize("key", ["", "key-a"], ids=["no keys", "a key"])
@on_loop
async def test_a_client_cannot_choose_hosts_blocks_or_ranks(key: str):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table() if key else None) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for name, value in PRIVILEGED.items():
            for _ in range(2):  # the second time the head is known
                body = chat(temperature=0.70) | {name: value}
                answer = await client.ask(body, more=bearer(key) + "X-Data-Parallel-Rank: 1\r\n")
                assert answer.status == 200
                received = upstream.requests[-1]
                assert received.json == chat(temperature=0.70)
                assert received.header("x-data-parallel-rank") is None


@on_loop
async def test_nor_by_what_they_lie_in_or_how_they_are_written():
    hidden = chat() | {
        "vllm_xargs": {"kv_transfer_params": {"remote_host": "x"}, "mine": 1},
        "sampling_params": {"extra_args": {"bootstrap_room": 1, "a": [2]}, "n": 1},
    }
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(hidden)).status == 200
        assert upstream.requests[-1].json == chat() | {
            "vllm_xargs": {"mine": 1},
            "sampling_params": {"extra_args": {"a": [2]}, "n": 1},
        }
        spelled = b'{"kv\\u005ftransfer_params":{},"model":"m","messages":[],"seed":1.0e0}'
        await client.send(post_bytes(spelled))
        assert (await client.answer()).status == 200
        assert upstream.requests[-1].body == b'{"model":"m","messages":[],"seed":1.0e0}'


@on_loop
async def test_what_is_nobodys_business_passes_byte_by_byte():
    body = b' { "model" : "m" , "messages" : [ ], "vllm_xargs": { "a" : 1.50 } } '
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(post_bytes(body))
        assert (await client.answer()).status == 200
        assert upstream.requests[-1].body == body


@on_loop
async def test_a_trusted_key_may():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table()) as rig,
        await RawClient.open(rig.port) as client,
    ):
        more = bearer("key-ours") + "X-Data-Parallel-Rank: 1\r\n"
        for _ in range(2):
            assert (await client.ask(chat() | PRIVILEGED, more=more)).status == 200
            assert upstream.requests[-1].json == chat() | PRIVILEGED
            assert upstream.requests[-1].header("x-data-parallel-rank") == "1"


@on_loop
async def test_an_id_that_names_engines_is_not_repeated_to_them():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        named = "a___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:1_b"
        answer = await client.ask(chat(), more=f"x-request-id: {named}\r\n")
        assert answer.status == 200
        assert upstream.requests[-1].header("x-request-id") != named


@on_loop
async def test_each_tenant_has_a_salt_of_its_own_under_the_scope_tenant():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table("tenant")) as rig,
        await RawClient.open(rig.port) as client,
    ):
        salts: dict[str, set[str]] = {}
        for key in ("key-a", "key-b"):
            for wanted in ({}, {"cache_salt": "mine"}, {}, {"cache_salt": "mine"}):
                assert (await client.ask(chat(**wanted), more=bearer(key))).status == 200
                sent = upstream.requests[-1].json
                salts.setdefault(f"{key} {wanted}", set()).add(sent.pop("cache_salt"))
                assert sent == chat()
        assert all(len(each) == 1 for each in salts.values())  # the same each time
        assert len(set.union(*salts.values())) == 4  # and nobody's else
        # A client cannot give the salt of another: it goes into its own.
        [of_b] = salts["key-b {}"]
        await client.ask(chat(cache_salt=of_b), more=bearer("key-a"))
        assert upstream.requests[-1].json["cache_salt"] != of_b


@on_loop
async def test_the_salt_is_part_of_what_the_router_looks_up():
    """Else it would send a tenant to where another one's prompt is cached."""
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table("tenant")) as rig,
        await RawClient.open(rig.port) as client,
    ):
        text = "the same long beginning of everybody's prompt " * 40
        for key in ("key-a", "key-a", "key-b"):
            assert (await client.ask(chat(text), more=bearer(key))).status == 200
        assert [record.predicted_tokens > 0 for record in rig.records] == [False, True, False]


@on_loop
async def test_embeddings_and_the_scope_shared_get_no_salt():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table("tenant")) as rig,
        await RawClient.open(rig.port) as client,
    ):
        requested = {"model": "m", "input": "x"}
        await client.ask(requested, "/v1/embeddings", more=bearer("key-a"))
        assert upstream.requests[-1].json == requested
        rig.gate.replace_keys(table("shared"))
        await client.ask(chat(cache_salt="mine"), more=bearer("key-a"))
        assert upstream.requests[-1].json == chat(cache_salt="mine")


def test_the_same_tenant_has_the_same_salt_at_every_router():
    one, other = (
        {limits.tenant: limits.cache_salt for limits in table("tenant").limits.values()}
        for _ in range(2)
    )
    assert one == other
    assert len(set(one.values())) == len(KEYS)
    assert json.dumps(one).isascii()


@on_loop
async def test_what_an_engine_keeps_belongs_to_the_tenant_that_asked_for_it():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table()) as rig,
        await RawClient.open(rig.port) as client,
    ):
        owners = {}
        for key in ("key-a", "key-b"):
            forged = bearer(key) + "x-octavo-owner: somebody\r\n"
            requested = {"model": "m", "input": "x"}
            await client.ask(requested, "/v1/responses", more=forged)
            [owner] = [
                value for name, value in upstream.requests[-1].headers if name == "x-octavo-owner"
            ]
            owners[key] = owner
            await client.ask(chat(), more=forged)  # it may retain KV blocks
            assert upstream.requests[-1].header("x-octavo-owner") == owner
            await client.ask({"model": "m", "input": "x"}, "/v1/embeddings", more=forged)
            assert upstream.requests[-1].header("x-octavo-owner") is None
        assert len({*owners.values(), "somebody"}) == 3


@pytest.mark.parametrize("id_", ["..%2f..%2fmetrics", "resp_a%00", "a.b", "x" * 129, "resp_a;b"])
@on_loop
async def test_only_an_id_leads_to_an_engine(id_: str):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.get(f"/v1/responses/{id_}")
        assert (answer.status, answer.code) == (404, "response_not_found")
        assert upstream.requests == []
