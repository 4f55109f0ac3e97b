"""What tenants used is what they were given, once: engines die, refuse, and clients leave."""

from __future__ import annotations

import asyncio

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import make_table
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, fixed
from tests.router.proxy.test_resume_faults import WHOLE, WORDS, Engine, word

TENANTS = ("streams", "whole", "leaves", "refused")
TABLE = make_table(
    [KeyConfig(tenant=name, key=name, tokens_per_min=6_000_000.0) for name in TENANTS], {}
)


def key(name: str) -> str:
    return f"authorization: Bearer {name}\r\n"


@pytest.mark.parametrize("num_words", [0, 1, 4])
@on_loop
async def test_each_token_is_counted_once_for_who_got_it(num_words: int):
    """The first engine breaks every stream after so many words; the second one goes on."""
    lost, other = Engine(num_words=num_words, how="reset"), Engine()

    async def first_script(peer: Peer, request: Received) -> None:
        await (lost if request.json.get("stream") else refuses)(peer, request)

    async def refuses(peer: Peer, request: Received) -> None:
        await peer.answer(b'{"error":{"code":"queue_full"}}', status="503 Service Unavailable")

    async def second_script(peer: Peer, request: Received) -> None:
        is_stream = request.header("x-octavo-stream") is not None
        await (other if is_stream else fixed)(peer, request)

    config = fast_config(retry={"budget": 1.0, "budget_min": 100, "client_share": 1.0})
    async with (
        ScriptedUpstream(first_script) as first,
        ScriptedUpstream(second_script) as second,
        routing_to(first.port, second.port, table=TABLE, config=config, kind="octavo") as rig,
    ):

        async def ask(name: str, count: int, *, stream: bool) -> None:
            async with await RawClient.open(rig.port) as client:
                for _ in range(count):
                    body = chat(stream=True) if stream else chat()
                    answer = await client.ask(body, more=key(name))
                    assert answer.status == 200
                    if stream:
                        assert answer.body == WHOLE

        await asyncio.gather(ask("streams", 4, stream=True), ask("whole", 6, stream=False))
        await rig.settled()
        tenants = rig.metrics.tenants
        streams, whole = tenants["streams"], tenants["whole"]
        assert (streams.requests, whole.requests) == (4, 6)
        # Each resume computes the prompt anew, and the tenant pays for one.
        assert (streams.prompt_tokens, streams.output_tokens) == (4 * 40, 4 * len(WORDS))
        assert (whole.prompt_tokens, whole.output_tokens) == (6 * 10, 6 * 6)
        for name, used in (("streams", 4 * (40 + len(WORDS))), ("whole", 6 * 16)):
            tenant = rig.gate.authenticate(f"Bearer {name}")
            assert tenant.in_flight == 0
            assert tenant.tokens is not None
            missing = tenant.tokens.capacity - tenant.tokens.level(tenant.tokens._at)
            assert missing <= used  # what was estimated on arrival is given back; it fills up


@pytest.mark.parametrize("num_words", [1, 3])
@on_loop
async def test_a_client_that_leaves_has_used_what_it_was_sent(num_words: int):
    async with (
        ScriptedUpstream(Engine(num_words=num_words, how="stall")) as upstream,
        routing_to(upstream.port, table=TABLE, kind="octavo") as rig,
    ):
        for _ in range(3):
            client = await RawClient.open(rig.port)
            await client.post(chat(stream=True), more=key("leaves"))
            assert (await client.head()).status == 200
            body = b""
            while body != b"".join(map(word, range(num_words))):
                body += await client.chunk()
            client.reset()
            await rig.settled()
        used = rig.metrics.tenants["leaves"]
        assert used.requests == 3
        assert (used.prompt_tokens, used.output_tokens) == (3 * 40, 3 * num_words)
        assert {record.outcome for record in rig.records} == {"client_gone"}


@on_loop
async def test_who_was_refused_has_used_nothing():
    async def refuses(peer: Peer, request: Received) -> None:
        await peer.answer(b'{"error":{"code":"x"}}', status="503 Service Unavailable")

    async with (
        ScriptedUpstream(refuses) as upstream,
        routing_to(upstream.port, table=TABLE) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(), more=key("refused"))).status == 503
        await rig.settled()
        used = rig.metrics.tenants["refused"]
        assert (used.requests, used.rejections) == (1, 1)
        assert (used.prompt_tokens, used.output_tokens) == (0, 0)
