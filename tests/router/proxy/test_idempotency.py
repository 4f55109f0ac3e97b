"""A client that asks again with the same idempotency key gets the same answer, and runs nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import make_table
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, fixed
from tests.router.proxy.test_resume_faults import WHOLE, Engine

KEY = "idempotency-key: 0b1c-7\r\n"


@dataclass
class Held:
    """Answers when it is told to."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, peer: Peer, request: Received) -> None:
        await self.go.wait()
        await fixed(peer, request)


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_the_same_again_is_given_and_not_run(is_stream: bool):
    body = chat(stream=True) if is_stream else chat()
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as other,
    ):
        first = await client.ask(body, more=KEY)
        assert (first.status, first.header("idempotent-replayed")) == (200, None)
        for again in (client, other):
            answer = await again.ask(body, more=KEY)
            assert (answer.status, answer.body) == (200, first.body)
            assert answer.header("content-type") == first.header("content-type")
            assert answer.header("idempotent-replayed") == "true"
            assert answer.header("x-request-id") != first.header("x-request-id")
        assert len(upstream.requests) == 1
        assert (await client.ask(body)).status == 200  # without a key it is another request
        assert len(upstream.requests) == 2
        await rig.settled()
        assert [record.outcome for record in rig.records] == ["ok"] * 4
        assert [record.attempts for record in rig.records] == [1, 0, 0, 1]
        tokens = sum(rig.metrics.tokens.values())
        assert tokens == 2 * sum((10, 6, 4)) or is_stream  # only what ran was counted


@on_loop
async def test_one_that_is_under_way_and_one_with_another_body_are_refused():
    held = Held()
    async with (
        ScriptedUpstream(held) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as other,
    ):
        await client.post(chat(), more=KEY)
        await rig.until(lambda: len(upstream.requests) == 1)
        answer = await other.ask(chat(), more=KEY)
        assert (answer.status, answer.code) == (409, "idempotency_in_progress")
        assert answer.header("retry-after") == "1"
        answer = await other.ask(chat("else"), more=KEY)
        assert (answer.status, answer.code) == (422, "idempotency_key_reused")
        held.go.set()
        assert (await client.answer()).json == CHAT
        assert (await other.ask(chat(), more=KEY)).json == CHAT
        assert len(upstream.requests) == 1
        await rig.settled()


@on_loop
async def test_a_client_that_left_may_ask_again_and_its_first_run_was_cancelled():
    held = Held()
    async with ScriptedUpstream(held) as upstream, routing_to(upstream.port) as rig:
        client = await RawClient.open(rig.port)
        await client.post(chat(), more=KEY)
        await rig.until(lambda: len(upstream.requests) == 1)
        client.reset()
        await rig.settled()
        held.go.set()
        async with await RawClient.open(rig.port) as again:
            answer = await again.ask(chat(), more=KEY)
            assert answer.json == CHAT
            assert answer.header("idempotent-replayed") is None
        await rig.settled()


@pytest.mark.parametrize("status", ["503 Service Unavailable", "500 Oops", "400 Bad Request"])
@on_loop
async def test_what_failed_is_tried_anew(status: str):
    async def fails_once(peer: Peer, request: Received) -> None:
        if len(upstream.requests) == 1:
            await peer.answer(b'{"error":{"code":"x"}}', status=status)
        else:
            await fixed(peer, request)

    async with (
        ScriptedUpstream(fails_once) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(), more=KEY)).status == int(status[:3])
        assert (await client.ask(chat(), more=KEY)).status == 200
        assert (await client.ask(chat(), more=KEY)).header("idempotent-replayed") == "true"
        assert len(upstream.requests) == 2
        await rig.settled()


@on_loop
async def test_an_answer_that_was_continued_elsewhere_is_kept_whole():
    """An engine dies in the middle of it; what is given again is the joined stream."""
    lost = Engine(num_words=2, how="reset")
    async with (
        ScriptedUpstream(lost) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(stream=True), more=KEY)).body == WHOLE
        assert (await client.ask(chat(stream=True), more=KEY)).body == WHOLE
        assert len(first.requests) + len(second.requests) == 2
        await rig.settled()


@on_loop
async def test_a_key_is_nobody_elses():
    table = make_table([KeyConfig(tenant=name, key=name) for name in ("a", "b")], {})
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, table=table) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for name in ("a", "b"):
            answer = await client.ask(chat(), more=f"authorization: Bearer {name}\r\n{KEY}")
            assert answer.header("idempotent-replayed") is None
        assert len(upstream.requests) == 2
        answer = await client.ask(chat(), more=f"authorization: Bearer no\r\n{KEY}")
        assert answer.status == 401


@on_loop
async def test_keys_that_are_none_and_routers_that_keep_none():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        for value in ("", "x" * 256, "\u00e9"):
            more = f"idempotency-key: {value}\r\n"
            answer = await client.ask(chat(), more=more)
            assert (answer.status, answer.code) == (400, "invalid_header"), value
    config = fast_config(flow={"idempotency_s": 0.0})
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, config=config) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(2):
            assert (await client.ask(chat(), more=KEY)).status == 200
        assert len(upstream.requests) == 2


@on_loop
async def test_over_http_1_0_a_stream_is_kept_too():
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        bodies = set()
        for _ in range(2):
            async with await RawClient.open(rig.port) as client:
                data = b'{"model":"m","messages":[],"stream":true}'
                await client.send(
                    b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\nidempotency-key: q\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    % len(data)
                    + data
                )
                bodies.add((await client.answer()).body)
        assert len(bodies) == 1
        assert len(upstream.requests) == 1
        await rig.settled()
