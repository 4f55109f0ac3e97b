"""What clients of the fault scenarios count: answers that differ, and those that do not come."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from benchmarks.faults import drains
from benchmarks.faults.answers import CASES, CHAT, PICTURE_CASES, Answer, Case, body_of
from benchmarks.faults.clients import Clients, causes, limits_of
from tests.fakes.upstream import Peer, Received, ScriptedUpstream

WHOLE = (
    b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1}}'
)
SAME = Answer((("hi", (), (), "stop"),), 3, 1)


def seen_by(expected: Answer, *, status: str = "200 OK", stream: bool = False) -> Clients:
    """One client that sends one request."""

    async def answer(peer: Peer, request: Received) -> None:
        clients.end()
        await peer.answer(WHOLE, status=status)

    async def play() -> None:
        async with ScriptedUpstream(answer) as upstream:
            urls.append(f"http://127.0.0.1:{upstream.port}")
            await clients.run(1)

    urls: list[str] = []
    case = Case("chat", CHAT, {})
    body = {"model": "m", "messages": [], "stream": stream}
    clients = Clients(lambda: urls[0], [(case, body, expected)])
    asyncio.run(play())
    return clients


def test_the_same_answer_is_survived():
    tally = seen_by(SAME).tally
    assert tally.board == {"chat": (1, 0)} and not tally.lost and not tally.changed


def test_another_answer_and_none_are_not():
    other = SAME._replace(output_tokens=2)
    assert seen_by(other).tally.board == {"chat": (1, 1)}
    assert len(seen_by(other).tally.changed) == 1
    for clients in (seen_by(SAME, status="503 No"), seen_by(SAME, stream=True)):
        assert clients.tally.board == {"chat": (1, 1)}
        assert len(clients.tally.lost) == 1 and not clients.tally.live


def test_no_client_ends_a_connection_of_its_own_accord():
    """One that expires is ended also where a request has just been given it."""
    assert limits_of(20).keepalive_expiry is None


def test_the_innermost_cause_is_named():
    outer = httpx.ReadError("")
    outer.__cause__ = ConnectionResetError(104, "Connection reset by peer")
    assert (
        causes(outer) == "ReadError:  of ConnectionResetError: [Errno 104] Connection reset by peer"
    )


def test_pictures_are_in_the_parts_that_an_endpoint_takes():
    for number, case in enumerate(PICTURE_CASES):
        body = body_of(case, number, 1)
        [message] = body.get("messages") or body["input"]
        kinds = [part["type"] for part in message["content"]]
        assert len(kinds) == case.num_pictures + 1
        assert all("image" in kind for kind in kinds[:-1]) and "text" in kinds[-1]
    assert not any(case.num_pictures for case in CASES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_roll_loses_nothing():
    verdict = drains.run(0.01, num_clients=4)
    assert not verdict.complaints
    assert verdict.seen["engines replaced"] >= 1 and verdict.seen["requests"] > 0
