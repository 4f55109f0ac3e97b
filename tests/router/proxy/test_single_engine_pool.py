"""A pool of one engine: it refuses, dies, comes back; and what its clients see of that."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo_engine.protocol.resume import begin_line, token_line
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, event, fixed
from tests.router.proxy.test_resume_faults import WHOLE, Engine

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Kind
    from octavo_router.http.client_connection import ClientConnection


@dataclass
class DiesWhenTold(Engine):
    dies: asyncio.Event = field(default_factory=asyncio.Event)

    async def _be_lost(self, peer: Peer, next_event: bytes) -> None:
        await self.dies.wait()
        await super()._be_lost(peer, next_event)


@pytest.mark.parametrize(
    ("status", "retry_after", "num_requests"),
    [
        ("503 Service Unavailable", "0", 2),  # again, as it said itself
        ("429 Too Many Requests", "0", 2),
        ("503 Service Unavailable", "", 1),  # it did not say: its answer is the client's
        ("503 Service Unavailable", "7", 1),  # too long to keep a client for
        ("503 Service Unavailable", "soon", 1),
        ("500 Internal Server Error", "0", 1),  # it may have run
        ("502 Bad Gateway", "0", 1),
        ("400 Bad Request", "0", 1),
        ("404 Not Found", "0", 1),
    ],
)
@on_loop
async def test_who_refuses_is_asked_again_only_when_it_said_so(
    status: str, retry_after: str, num_requests: int
):
    async def once(peer: Peer, request: Received) -> None:
        if len(upstream.requests) > 1:
            return await fixed(peer, request)
        more = f"retry-after: {retry_after}\r\n" if retry_after else ""
        return await peer.answer(b'{"error":{"code":"x"}}', status=status, more=more)

    async with (
        ScriptedUpstream(once) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat())
        assert len(upstream.requests) == num_requests
        if num_requests == 2:
            assert answer.json == CHAT
        else:
            assert answer.status == int(status[:3])
            assert answer.header("retry-after") == (retry_after or None)
        await rig.settled()


@pytest.mark.slow
@on_loop
async def test_who_asks_for_a_moment_is_given_it():
    async def once(peer: Peer, request: Received) -> None:
        if len(upstream.requests) > 1:
            return await fixed(peer, request)
        more = "retry-after: 1\r\n"
        return await peer.answer(b"{}", status="503 Service Unavailable", more=more)

    async with (
        ScriptedUpstream(once) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        began_at = time.monotonic()
        await client.post(chat())
        await rig.until(lambda: len(upstream.requests) == 1)
        gone = await RawClient.open(rig.port)  # another one does not wait for that
        assert (await gone.ask(chat())).status == 200
        gone.writer.close()
        assert (await client.answer()).json == CHAT
        assert time.monotonic() - began_at >= 1.0
        await rig.settled()


@on_loop
async def test_a_stream_waits_for_its_engine_to_come_back_and_goes_on():
    """The only engine is killed within an answer. One that starts in its place continues it."""
    lost = DiesWhenTold(num_words=2, how="reset")
    async with ScriptedUpstream(lost) as first, routing_to(first.port, kind="octavo") as rig:
        async with await RawClient.open(rig.port) as client:
            [endpoint] = rig.endpoints
            await client.post(chat(stream=True))
            head = await client.head()
            assert head.status == 200
            body = await client.chunk()
            # What signals do when an engine is gone: its stream ends with it.
            rig.registry.report(endpoint, "down")
            lost.dies.set()
            await rig.until(lambda: rig.gate.demand("default").held == 1)
            lost.num_words = 100
            rig.registry.report(endpoint, "ready")
            while piece := await client.chunk():
                body += piece
            assert body == WHOLE
            assert lost.resumes == [[0, 1]]
        await rig.settled()
        [record] = rig.records
        assert (record.outcome, record.resumes, record.attempts) == ("ok", 1, 2)
        assert record.queue_s > 0.0
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (40, 32, 5)


@on_loop
async def test_a_client_that_leaves_while_its_stream_waits_is_forgotten():
    lost = DiesWhenTold(num_words=2, how="reset")
    async with ScriptedUpstream(lost) as first, routing_to(first.port, kind="octavo") as rig:
        client = await RawClient.open(rig.port)
        await client.post(chat(stream=True))
        await client.head()
        await client.chunk()
        rig.registry.report(rig.endpoints[0], "down")
        lost.dies.set()
        await rig.until(lambda: rig.gate.demand("default").held == 1)
        client.reset()
        await rig.until(lambda: rig.gate.demand("default").held == 0)
        await rig.settled()
        assert rig.records[0].outcome == "client_gone"


@pytest.mark.parametrize("num_streams", [24])
@on_loop
async def test_the_death_of_half_the_pool_costs_no_stream_though_budgets_are_small(
    num_streams: int,
):
    """All of its streams go on at once: more than a fifth of what is under way."""
    config = fast_config(retry={"budget": 0.0, "budget_min": 1, "client_share": 0.0})
    everybody = asyncio.Event()
    lost, other = Engine(), Engine()

    async def dies(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        begin = begin_line(
            id="c-1", created=1, seed=7, answers=1, prompt_tokens=40, cached=32
        )  # fmt: skip
        lost.heads.append(request)
        if len(lost.heads) % 2:  # some have seen nothing yet
            await peer.chunk(begin + token_line(0, [0]) + WHOLE.split(b"\n\n")[0] + b"\n\n")
        if len(lost.heads) == num_streams:
            everybody.set()
        await everybody.wait()
        peer.reset()

    async with (
        ScriptedUpstream(dies) as first,
        ScriptedUpstream(other) as second,
        routing_to(first.port, second.port, config=config, kind="octavo") as rig,
    ):

        async def ask() -> bytes:
            async with await RawClient.open(rig.port) as client:
                return (await client.ask(chat(stream=True))).body

        bodies = await asyncio.gather(*(ask() for _ in range(num_streams)))
        assert set(bodies) == {WHOLE}
        await rig.settled()


@dataclass
class Ends:
    """Holds what it is given until it has so much, and gives all of it back."""

    code: str
    count: int
    is_full: asyncio.Event = field(default_factory=asyncio.Event)
    num_held: int = 0

    async def __call__(self, peer: Peer, request: Received) -> None:
        self.num_held += 1
        if self.num_held == self.count:
            self.is_full.set()
        await self.is_full.wait()
        error = json.dumps({"error": {"message": "bye", "type": "x", "code": self.code}})
        await peer.answer(error.encode(), status="503 Gone", more="retry-after: 1\r\n")


@pytest.mark.parametrize("kind", ["octavo", "openai"])
@pytest.mark.parametrize("code", ["server_shutdown", "draining", "engine_dead", "engine_stalled"])
@on_loop
async def test_what_an_engine_gives_back_at_its_end_is_repeated_outside_the_budget(
    code: str, kind: Kind
):
    config = fast_config(retry={"budget": 0.0, "budget_min": 0, "client_share": 0.0})
    async with (
        ScriptedUpstream(Ends(code, 12)) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port, config=config, kind=kind) as rig,
    ):

        async def ask(number: int) -> int:
            async with await RawClient.open(rig.port) as client:
                return (await client.ask(chat(seed=number))).status

        assert await asyncio.gather(*map(ask, range(12))) == [200] * 12
        assert len(second.requests) == 12
        await rig.settled()


@on_loop
async def test_two_engines_that_end_one_after_the_other_cost_no_answer():
    async with (
        ScriptedUpstream(Ends("engine_stalled", 1)) as first,
        ScriptedUpstream(Ends("draining", 1)) as second,
        ScriptedUpstream() as third,
        routing_to(first.port, second.port, third.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).json == CHAT
        assert rig.records[0].attempts == 3
        await rig.settled()


@on_loop
async def test_an_engine_that_gives_back_all_it_is_given_does_not_multiply_the_work():
    """It goes on saying that it ends: only its first end is free."""
    async with (
        ScriptedUpstream(Ends("server_shutdown", 1)) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for number in range(100):
            await client.ask(chat(seed=number))
        assert sum(record.attempts for record in rig.records) <= 120
        await rig.settled()


@on_loop
async def test_a_stream_that_times_out_is_repeated_only_within_the_budget():
    """Nobody has died: a timeout that were repeated for free would multiply slow work."""
    config = fast_config(retry={"budget": 0.0, "budget_min": 0})
    async with (
        ScriptedUpstream(Engine(num_words=0, how="stall")) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, config=config, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat(stream=True))
        await rig.has_head()
        await rig.given_up(rig.endpoints[0], after_s=61.0)
        answer = await client.answer()
        assert (answer.status, answer.code) == (504, "upstream_stalled")
        assert not second.requests
        await rig.settled()


@on_loop
async def test_what_a_hanging_engine_has_in_hand_goes_on_elsewhere_outside_the_budget():
    """It says nothing to its routers either; one that is only slow does."""
    config = fast_config(retry={"budget": 0.0, "budget_min": 0, "client_share": 0.0})
    async with (
        ScriptedUpstream(Engine(num_words=2, how="stall")) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, config=config, kind="octavo") as rig,
    ):

        async def ask(number: int) -> bytes:
            async with await RawClient.open(rig.port) as client:
                return (await client.ask(chat(stream=True))).body

        asked = [asyncio.create_task(ask(number)) for number in range(6)]
        hanging = rig.endpoints[0]
        await rig.until(lambda: hanging.in_flight == 6)
        rig.registry.report(hanging, "down", "nothing was heard for 5 s")
        await rig.given_up(hanging, after_s=61.0)
        assert await asyncio.gather(*asked) == [WHOLE] * 6
        await rig.settled()


@on_loop
async def test_one_that_loses_everything_it_is_given_does_not_multiply_the_work():
    """Both engines break every stream, for good: only their first deaths are free."""
    engines = [Engine(num_words=1, how="close") for _ in range(2)]
    async with (
        ScriptedUpstream(engines[0]) as first,
        ScriptedUpstream(engines[1]) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(100):
            await client.ask(chat(stream=True))
        assert sum(record.attempts for record in rig.records) <= 120
        await rig.settled()


@on_loop
async def test_an_engine_that_was_started_again_may_die_again_at_once_and_costs_no_stream():
    """Its next process has nothing to do with what the one before lost a moment ago."""
    config = fast_config(retry={"budget": 0.0, "budget_min": 0, "client_share": 0.0})
    dying = DiesWhenTold(num_words=2, how="reset")
    async with (
        ScriptedUpstream(dying) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, config=config, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        lost, other = rig.endpoints
        for epoch in ("first", "second", "third"):
            lost.epoch = epoch
            rig.registry.report(other, "down")
            await client.post(chat(stream=True))
            await client.head()
            body = await client.chunk()
            rig.registry.report(other, "ready")
            dying.dies.set()
            while piece := await client.chunk():
                body += piece
            assert body == WHOLE
            dying.dies.clear()
        assert [record.resumes for record in rig.records] == [1, 1, 1]
        await rig.settled()


@on_loop
async def test_tokens_out_of_order_fail_the_stream_and_speak_against_the_engine():
    """Nothing of it is relayed, another engine answers, and the failure counts."""

    async def liar(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(token_line(3, [1]) + event("lie"))
        await peer.left()

    async with (
        ScriptedUpstream(liar) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        reported: list[str] = []
        rig.proxy.dispatcher.on_result = (  # type: ignore[attr-defined]
            lambda pool, result: reported.append(result.value)
        )
        assert (await client.ask(chat(stream=True))).body == WHOLE
        assert reported == ["bad_answer", "ok"]
        await rig.settled()


@on_loop
async def test_a_slow_engine_is_ended_on_time_and_nobody_else_waits():
    """A token now and then is progress; the whole may take so long and no longer."""

    async def drip(peer: Peer, request: Received) -> None:
        if not request.json.get("stream"):
            return await fixed(peer, request)
        await peer.begin_stream()
        while True:
            await peer.chunk(event("x"))
            await asyncio.sleep(0.05)

    async with (
        ScriptedUpstream(drip) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as other,
    ):
        await client.post(chat(stream=True))
        assert (await client.head()).status == 200
        for _ in range(10):
            assert await client.chunk() == event("x")
            assert (await other.ask(chat())).status == 200
            rig.later(20.0)
        rig.later(600.0)
        body = b""
        while piece := await client.chunk():
            body += piece
        assert b'"code": "deadline_exceeded"' in body
        assert body.endswith(b"data: [DONE]\n\n")
        await rig.settled()


@on_loop
async def test_a_host_that_vanishes_is_noticed_by_the_kernel():
    """No packet says so; within ten seconds the socket does, used or idle."""
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 200
        [connection] = rig.upstreams.of(rig.endpoints[0]).pool._open
        sock = connection._transport.get_extra_info("socket")
        tcp = socket.IPPROTO_TCP
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, probes = (
            sock.getsockopt(tcp, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * probes <= 10
        assert 0 < sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) <= 10_000


def all_hold(connections: list[ClientConnection], num_bytes: int) -> bool:
    return all(len(one._buffer) == num_bytes for one in connections)


@on_loop
async def test_many_who_send_a_byte_now_and_then_hold_nobody_up():
    """Three hundred of them, each ended at its header's deadline.

    Hours are told, not waited for, and work is measured by the processor's time: how long it takes
    by the wall is the machine's affair.
    """
    config = fast_config(timeouts={"header_s": 3600.0, "idle_s": 7200.0})
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, config=config) as rig,
        await RawClient.open(rig.port) as client,
        AsyncExitStack() as stack,
    ):
        assert (await client.ask(chat())).status == 200
        [asking] = rig.shared.connections
        lorises = [
            await stack.enter_async_context(await RawClient.open(rig.port)) for _ in range(300)
        ]
        await rig.until(lambda: len(rig.shared.connections) == 1 + len(lorises))
        slow = [one for one in rig.shared.connections if one is not asking]
        text = b"POST /v1/chat/completions HTTP/1.1\r\n"
        deadlines: list[float] = []
        most_s = 0.0
        for at in range(8):
            for loris in lorises:
                loris.writer.write(text[at : at + 1])
            used_s = time.process_time()
            assert (await client.ask(chat())).status == 200
            most_s = max(most_s, time.process_time() - used_s)
            await rig.until(partial(all_hold, slow, at + 1))
            deadlines = deadlines or [one.deadline for one in slow]
        assert most_s < 0.25
        assert [one.deadline for one in slow] == deadlines  # no later byte moves it
        rig.deadlines.check(min(deadlines) - 0.001)
        assert len(rig.shared.connections) == 1 + len(lorises)
        rig.deadlines.check(max(deadlines))
        answers = [await loris.answer() for loris in lorises]
        assert {answer.status for answer in answers} == {408}
        assert (await client.ask(chat())).status == 200
        await stack.aclose()
        await rig.until(lambda: len(rig.shared.connections) == 1)


@pytest.mark.parametrize(("how", "result"), [("say so", "left"), ("reset", "broken")])
@on_loop
async def test_an_engine_that_says_that_it_must_go_has_not_failed(how: str, result: str):
    async with (
        ScriptedUpstream(Engine(num_words=1, how=how)) as first,
        ScriptedUpstream(Engine()) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        reported: list[str] = []
        rig.proxy.dispatcher.on_result = (  # type: ignore[attr-defined]
            lambda pool, result: reported.append(result.value)
        )
        assert (await client.ask(chat(stream=True))).body == WHOLE
        assert reported == [result, "ok"]
        await rig.settled()
