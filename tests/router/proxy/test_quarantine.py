"""A request that its engine dies of: two engines at most, whoever sends it and however often."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.resume import begin_line, token_line, unpack
from octavo_router.proxy import exchange
from octavo_router.routing.policies import Policies
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import CHAT, ScriptedUpstream
from tests.router.proxy.test_health_over_sockets import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from octavo_router.endpoints.endpoint import Kind
    from tests.fakes.upstream import Peer, Received

pytestmark = pytest.mark.slow

NUM_WORDS = 40
SUSPECT_S, GONE_ON_S = exchange._SUSPECT_S, exchange._GONE_ON_S
POISON = "the words that kill"


def word(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
WHOLE = b"".join(map(word, range(NUM_WORDS))) + LAST + b"data: [DONE]\n\n"


@dataclass
class Mortal:
    """Answers all but one request, whose death takes along all that is under way there."""

    kills_at: int = 0  # words of a stream before that
    says: str = ""  # the code that whole requests get; "": the connection ends
    pause_s: float = 0.02
    upstream: ScriptedUpstream = field(init=False)
    num_deaths: int = 0
    num_requests: int = 0

    async def __call__(self, peer: Peer, request: Received) -> None:
        body, done = request.body, 0
        if request.header("x-octavo-resume") == "1":
            resume, body = unpack(request.body)
            done = len(json.loads(resume)["tokens"][0])
        is_poison, life = POISON.encode() in body, self.num_deaths
        self.num_requests += is_poison
        if not json.loads(body).get("stream"):
            await asyncio.sleep(self.pause_s)
            if is_poison:
                return await self.die(peer, life)
            return await peer.answer(json.dumps(CHAT).encode())
        await peer.begin_stream()
        begin = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=4, cached=0)
        for number in range(done, NUM_WORDS):
            await asyncio.sleep(self.pause_s)
            if is_poison and number >= self.kills_at:
                return await self.die(peer, life)
            await peer.chunk(begin + token_line(0, [number]) + word(number))
            begin = b""
        await peer.chunk(begin + token_line(0, []) + LAST + b"data: [DONE]\n\n")
        return await peer.end_stream()

    async def die(self, peer: Peer, life: int) -> None:
        """It is there again at once, as far as its port tells."""
        if life != self.num_deaths:
            return  # that one is over, and this was reset with it
        self.num_deaths += 1
        if self.says:
            error = {"error": {"message": "x", "type": "x", "code": self.says}}
            await peer.answer(json.dumps(error).encode(), status="503 Dead")
        for each in self.upstream.peers:
            if not (each.writer.transport.is_closing() or (self.says and each is peer)):
                each.reset()


@asynccontextmanager
async def pool_of(count: int, *, kind: Kind = "octavo", **how: Any) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        engines = [Mortal(**how) for _ in range(count)]
        for engine in engines:
            engine.upstream = await stack.enter_async_context(ScriptedUpstream(engine))
        rig = await stack.enter_async_context(
            routing_to(*(engine.upstream.port for engine in engines), kind=kind)
        )
        yield Pool(engines, rig)


@dataclass
class Pool:
    engines: list[Mortal]
    rig: Rig

    @property
    def num_deaths(self) -> int:
        return sum(engine.num_deaths for engine in self.engines)

    async def ask(self, text: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        async with await RawClient.open(self.rig.port) as client:
            return await client.ask(chat(messages=messages, **more))

    async def insist(self, **more: Any) -> list[int]:
        """As client libraries do: three tries, whatever the answer."""
        return [(await self.ask(POISON, **more)).status for _ in range(3)]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch, connections: None) -> None:
    """As they are."""
    monkeypatch.setattr(exchange, "_SUSPECT_S", SUSPECT_S)
    monkeypatch.setattr(exchange, "_GONE_ON_S", GONE_ON_S)


def take_turns(rig: Rig) -> None:
    """As requests do with any policy that looks at load."""
    rig.proxy.dispatcher.policies = Policies(Turns())  # type: ignore[attr-defined]


@pytest.mark.parametrize("says", ["", "engine_dead"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_at_once", [False, True])
@on_loop
async def test_six_clients_that_insist_cost_two_engines_and_nobody_else_anything(
    is_at_once: bool, is_stream: bool, says: str
):
    async with pool_of(4, says=says) as pool:
        take_turns(pool.rig)
        bystanders = [
            asyncio.create_task(pool.ask(f"question {number}", stream=True)) for number in range(24)
        ]
        await pool.rig.until(lambda: len(pool.rig.proxy.exchanges) == 24)
        await asyncio.sleep(0.1)
        if is_at_once:
            said = await asyncio.gather(*(pool.insist(stream=is_stream) for _ in range(6)))
        else:
            said = [await pool.insist(stream=is_stream) for _ in range(6)]
        assert pool.num_deaths <= 2
        assert {status for statuses in said for status in statuses} <= {422, 502, 503, 200}
        assert all(statuses[-1] == 422 for statuses in said)
        for bystander in bystanders:
            assert (await bystander).body == WHOLE
        assert (await pool.ask("another one")).json == CHAT
        await pool.rig.settled()


@on_loop
async def test_a_stream_that_kills_in_its_midst_is_not_carried_to_a_third_engine():
    async with pool_of(4, kills_at=5) as pool:
        answer = await pool.ask(POISON, stream=True)
        assert answer.body.startswith(b"".join(map(word, range(5))))
        assert b'"code": "request_quarantined"' in answer.body
        assert pool.num_deaths == 2
        again = await pool.ask(POISON, stream=True)
        assert (again.status, again.code) == (422, "request_quarantined")
        assert pool.num_deaths == 2
        await pool.rig.settled()


@on_loop
async def test_a_plain_server_gets_it_once_more_and_then_never():
    async with pool_of(3, kind="openai") as pool:
        assert await pool.insist() == [502, 422, 422]
        assert await pool.insist() == [422, 422, 422]
        assert pool.num_deaths == 2
        assert pool.rig.metrics.pool("default").quarantined == 1
        assert pool.rig.metrics.pool("default").rejections["request_quarantined",] == 4
        await pool.rig.settled()


@on_loop
async def test_it_is_let_in_again_after_the_stated_time(monkeypatch: pytest.MonkeyPatch):
    async with pool_of(2, kind="openai") as pool:
        quarantine = pool.rig.proxy.quarantine
        quarantine.config = fast_config(retry={"quarantine_s": 0.3}).retry
        assert await pool.insist() == [502, 422, 422]
        await asyncio.sleep(0.4)
        assert (await pool.ask(POISON)).status == 502
        await pool.rig.settled()


@on_loop
async def test_many_copies_of_what_harms_nobody_are_all_answered_and_spread():
    async with pool_of(4, pause_s=0.002) as pool:
        take_turns(pool.rig)
        answers = await asyncio.gather(*(pool.ask("hello", stream=True) for _ in range(64)))
        assert {answer.body for answer in answers} == {WHOLE}
        requested = [len(engine.upstream.requests) for engine in pool.engines]
        assert sum(requested) == 64 and min(requested) >= 8
        assert set(pool.rig.proxy.quarantine.watched.values()) == {True}
        await pool.rig.settled()
