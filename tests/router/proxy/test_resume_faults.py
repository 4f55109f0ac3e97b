"""An engine is lost within its answer; the client's answer goes on, from another engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from octavo_engine.protocol.resume import begin_line, token_line, unpack
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream

WORDS = ["a ", "b ", "c ", "d ", "e "]


def word(i: int) -> bytes:
    choice = {"index": 0, "delta": {"content": WORDS[i]}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def final() -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


WHOLE = b"".join(map(word, range(len(WORDS)))) + final() + b"data: [DONE]\n\n"


@dataclass
class Engine:
    """One of ours: tells tokens, continues where it is told, and is lost after some words."""

    num_words: int = 100  # that it sends before it is lost
    how: str = "close"
    resumes: list[list[int]] = field(default_factory=list)
    heads: list[Received] = field(default_factory=list)

    async def __call__(self, peer: Peer, request: Received) -> None:
        self.heads.append(request)
        done = 0
        if request.header("x-octavo-resume") == "1":
            reported, body = unpack(request.body)
            assert json.loads(body) == chat(stream=True)
            resume = json.loads(reported)
            assert (resume["id"], resume["seed"]) == ("c-1", 7)
            [tokens] = resume["tokens"]
            self.resumes.append(list(tokens))
            done = len(tokens)
        assert request.header("x-octavo-stream") == "tokens"
        await peer.begin_stream()
        begin = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=40, cached=32)
        for i in range(done, len(WORDS)):
            if i - done == self.num_words:
                return await self._be_lost(peer, token_line(0, [i]) + word(i))
            await peer.chunk(begin + token_line(0, [i]) + word(i))
            begin = b""
        await peer.chunk(begin + token_line(0, []) + final())
        await peer.chunk(b"data: [DONE]\n\n")
        return await peer.end_stream()

    async def _be_lost(self, peer: Peer, next_event: bytes) -> None:
        match self.how:
            case "close":
                await peer.chunk(next_event[:25])
                peer.close()
            case "reset":
                peer.reset()
            case "end":
                await peer.end_stream()  # well-formed, and too early
            case "stall":
                await peer.left()
            case "garbage":
                await peer.send(b"zz\r\n")
            case "say so":
                error = {"error": {"message": "bye", "type": "x", "code": "server_shutdown"}}
                await peer.chunk(
                    b"data: " + json.dumps(error, separators=(",", ":")).encode() + b"\n\n"
                )
                await peer.end_stream()


async def stalled(rig: Rig, client: RawClient, num_words: int) -> bytes:
    """The whole stream, given up at the first engine once these words are there."""
    body = b""
    if num_words:
        assert (await client.head()).status == 200
        while body != b"".join(map(word, range(num_words))):
            body += await client.chunk()
    await rig.given_up(rig.endpoints[0], after_s=61.0)
    if not num_words:
        assert (await client.head()).status == 200
    while piece := await client.chunk():
        body += piece
    return body


@pytest.mark.parametrize("how", ["close", "reset", "end", "stall", "garbage", "say so"])
@pytest.mark.parametrize("num_words", [0, 1, 3, 5])
@on_loop
async def test_the_joined_stream_is_the_unbroken_one(num_words: int, how: str):
    lost, other = Engine(num_words=num_words, how=how), Engine()
    async with (
        ScriptedUpstream(lost) as first,
        ScriptedUpstream(other) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat(stream=True))
        if how == "stall" and num_words < len(WORDS):
            assert await stalled(rig, client, num_words) == WHOLE
        else:
            answer = await client.answer()
            assert answer.status == 200
            assert answer.body == WHOLE
        if 0 < num_words < len(WORDS) and how != "garbage":  # with which some words are lost
            assert other.resumes == [list(range(num_words))]
        if num_words < len(WORDS) and how not in ("end", "say so"):
            await first.peers[0].has_left.wait()  # the old attempt was fenced
        await rig.settled()
        [record] = rig.records
        assert (record.outcome, record.output_tokens) == ("ok", len(WORDS))
        assert record.resumes == (1 if num_words < len(WORDS) else 0)


@on_loop
async def test_two_losses_are_survived_and_a_third_is_told():
    engines = [Engine(num_words=1) for _ in range(4)]
    async with (
        ScriptedUpstream(engines[0]) as a,
        ScriptedUpstream(engines[1]) as b,
        ScriptedUpstream(engines[2]) as c,
        ScriptedUpstream(engines[3]) as d,
        routing_to(a.port, b.port, c.port, d.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(stream=True))
        assert answer.body.startswith(word(0) + word(1) + word(2) + b'data: {"error"')
        assert b'"code": "upstream_lost"' in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert [engine.resumes for engine in engines] == [[], [[0]], [[0, 1]], []]
        await rig.settled()


@on_loop
async def test_it_is_not_continued_by_an_engine_of_another_kind():
    async with (
        ScriptedUpstream(Engine(num_words=2)) as first,
        ScriptedUpstream() as plain,
        routing_to(first.port, plain.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        rig.endpoints[1].kind = "openai"
        answer = await client.ask(chat(stream=True))
        assert answer.body.startswith(word(0) + word(1))
        assert plain.requests == []
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await rig.settled()


@pytest.mark.parametrize("how", ["close", "reset"])
@on_loop
async def test_an_answer_that_is_no_stream_is_asked_for_again(how: str):
    async def lost(peer: Peer, request: Received) -> None:
        await peer.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        if how == "close":
            peer.close()
        else:
            peer.reset()

    async with (
        ScriptedUpstream(lost) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat())
        assert (answer.status, answer.json) == (200, CHAT)
        assert [len(up.requests) for up in (first, second)] == [1, 1]
        await rig.settled()


@on_loop
async def test_a_client_that_leaves_while_it_is_continued_ends_that_too():
    silent: list[Peer] = []

    async def wait(peer: Peer, request: Received) -> None:
        silent.append(peer)
        await peer.left()

    async with (
        ScriptedUpstream(Engine(num_words=1)) as first,
        ScriptedUpstream(wait) as second,
        routing_to(first.port, second.port, kind="octavo") as rig,
    ):
        client = await RawClient.open(rig.port)
        await client.post(chat(stream=True))
        await rig.until(lambda: bool(silent))
        client.reset()
        await silent[0].has_left.wait()
        await rig.settled()
        assert rig.records[0].outcome == "client_gone"
