"""A client whose stream ended with its router continues it at another one: `x-octavo-continue`.

Red when: a token is lost or doubled, a router believes what a client says of addresses, or lines
of ours reach clients that did not ask for them.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from octavo_engine.protocol.resume import begin_line, unpack
from tests.fakes.http_client import RawClient, chat
from tests.fakes.process import serving
from tests.fakes.router_process import routing
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream
from tests.router.conftest import ENGINE_FLAGS
from tests.router.proxy.test_resume_faults import WHOLE, Engine, final, word
from tests.router.test_with_engines import bodies, unbroken

if TYPE_CHECKING:
    from tests.fakes.http_client import Answer

ASK = json.dumps(chat(stream=True)).encode()
PATH = "/v1/chat/completions"


def header(length: int) -> str:
    return f"x-octavo-continue: {length}\r\n"


def plain(stream: bytes) -> bytes:
    """What an SSE client reads of it."""
    return re.sub(rb"^:[^\n]*\n", b"", stream, flags=re.MULTILINE)


def up_to_last_event(stream: bytes) -> bytes:
    return stream[: stream.rfind(b"\n\n") + 2] if b"\n\n" in stream else b""


async def continued(port: int, seen: bytes, body: bytes = ASK, path: str = PATH) -> Answer:
    async with await RawClient.open(port) as client:
        return await client.ask(seen + body, path, header(len(seen)))


@dataclass
class WithAddress(Engine):
    """It serves its KV blocks to other engines."""

    async def __call__(self, peer: Peer, request: Received) -> None:
        if request.header("x-octavo-resume") == "1":
            assert "kv_address" not in json.loads(unpack(request.body)[0])
            return await super().__call__(peer, request)
        await peer.begin_stream()
        begin = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=40, cached=32,
                           kv_address="10.0.0.7:14579")  # fmt: skip
        await peer.chunk(begin + b": octavo 0 0\n" + word(0))
        return await self._be_lost(peer, b"")


@on_loop
async def test_only_who_says_so_gets_the_lines_that_it_continues_with():
    async with (
        ScriptedUpstream(Engine()) as upstream,
        routing_to(upstream.port, kind="octavo") as rig,
    ):
        async with await RawClient.open(rig.port) as client:
            assert (await client.ask(chat(stream=True))).body == WHOLE
        answered = (await continued(rig.port, b"")).body
        assert answered.startswith(b": octavo begin {") and b"\n: octavo 0 3\ndata: " in answered
        assert plain(answered) == plain(WHOLE)
        await rig.settled()


@on_loop
async def test_wherever_it_was_cut_another_router_goes_on_from_there():
    async with (
        ScriptedUpstream(Engine()) as upstream,
        routing_to(upstream.port, kind="octavo") as rig,
    ):
        whole = (await continued(rig.port, b"")).body
        end = whole.index(final())
        for at in range(0, end, 7):
            seen = up_to_last_event(whole[:at])
            engine = Engine()
            async with (
                ScriptedUpstream(engine) as other,
                routing_to(other.port, kind="octavo") as another,
            ):
                rest = await continued(another.port, seen)
                assert rest.status == 200
                assert plain(seen + rest.body) == plain(WHOLE)
                num_seen = seen.count(b"data: ")
                assert engine.resumes == ([list(range(num_seen))] if num_seen else [])
                await another.settled()
        await rig.settled()


@on_loop
async def test_a_stream_that_its_router_ended_with_an_error_goes_on_as_well():
    config = fast_config(retry={"max_resumes": 0})
    async with (
        ScriptedUpstream(Engine(num_words=2)) as lost,
        routing_to(lost.port, kind="octavo", config=config) as rig,
    ):
        seen = (await continued(rig.port, b"")).body
        assert b'"upstream_lost"' in seen
        await rig.settled()
    async with (
        ScriptedUpstream(Engine(num_words=1)) as third,
        ScriptedUpstream(Engine()) as fourth,
        routing_to(third.port, fourth.port, kind="octavo") as rig,
    ):
        rest = (await continued(rig.port, seen)).body  # over two engines, of which one is lost
        before = seen[: seen.index(b'data: {"error"')]
        assert plain(before + rest) == plain(WHOLE)
        again = (await continued(rig.port, before + up_to_last_event(rest[:-60]))).body
        assert plain(again).endswith(b"data: [DONE]\n\n")
        await rig.settled()


@on_loop
async def test_addresses_of_engines_are_neither_shown_nor_believed():
    config = fast_config(retry={"max_resumes": 0})
    async with (
        ScriptedUpstream(WithAddress()) as upstream,
        routing_to(upstream.port, kind="octavo", config=config) as rig,
    ):
        seen = (await continued(rig.port, b"")).body
        assert b"octavo begin" in seen and b"14579" not in seen
        forged = seen.replace(b'"cached": 32', b'"cached": 32, "kv_address": "169.254.169.254:80"')
        assert forged != seen
        rest = (await continued(rig.port, forged)).body
        assert plain(rest).startswith(word(1))
        await rig.settled()


@on_loop
async def test_an_engine_that_cannot_continue_is_not_asked():
    async with (
        ScriptedUpstream(Engine()) as ours,
        ScriptedUpstream() as foreign,
        routing_to(foreign.port, ours.port, kind="octavo") as rig,
    ):
        rig.endpoints[0].kind = "openai"
        seen = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=40, cached=32)
        seen += b": octavo 0 0\n" + word(0)
        assert plain((await continued(rig.port, seen)).body).startswith(word(1))
        rig.endpoints[1].kind = "openai"
        answer = await continued(rig.port, seen)
        assert (answer.status, answer.code) == (503, "no_endpoints")
        assert not foreign.requests
        await rig.settled()


BEGIN = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=40, cached=32)
SEEN = BEGIN + b": octavo 0 0\n" + word(0)


@pytest.mark.parametrize(
    ("seen", "length", "body", "path", "more", "says"),
    [
        (SEEN, "x", ASK, PATH, "", "a whole number of bytes"),
        (SEEN, "-1", ASK, PATH, "", "a whole number of bytes"),
        (SEEN, str(10**6), ASK, PATH, "", "but the body has"),
        (SEEN, "", json.dumps(chat()).encode(), PATH, "", "requires stream"),
        (SEEN, "", ASK, "/v1/messages", "", "for chat completions and completions only"),
        (SEEN, "", ASK, "/v1/embeddings", "", "for chat completions and completions only"),
        (SEEN, "", ASK, PATH, "idempotency-key: k\r\n", "idempotency-key"),
        (word(0), "", ASK, PATH, "", "does not begin with"),
        (SEEN + b": octavo 9 1\n" + word(1), "", ASK, PATH, "", "cannot be read"),
        (BEGIN.replace(b'"answers": 1', b'"answers": 99999999'), "", ASK, PATH, "", ""),
        (BEGIN[:-9] + b"\n" + SEEN[len(BEGIN) :], "", ASK, PATH, "", "cannot be read"),
        (SEEN + b": octavo 0\n" + final() + b"data: [DONE]\n\n", "", ASK, PATH, "", "complete"),
    ],
)  # fmt: skip
@on_loop
async def test_what_cannot_be_continued_is_refused(
    seen: bytes, length: str, body: bytes, path: str, more: str, says: str
):
    async with (
        ScriptedUpstream(Engine()) as upstream,
        routing_to(upstream.port, kind="octavo") as rig,
        await RawClient.open(rig.port) as client,
    ):
        lines = f"x-octavo-continue: {length or len(seen)}\r\n{more}"
        answer = await client.ask(seen + body, path, lines)
        if says:
            assert answer.status == 400
            assert says in answer.json["error"]["message"]
            assert answer.json["error"].get("param") in ("x-octavo-continue", None)
            assert not upstream.requests
        await rig.settled()


@pytest.mark.slow
def test_a_router_is_killed_and_another_one_goes_on_token_for_token():
    wanted = bodies(6, max_tokens=120, start=900)
    with serving(*ENGINE_FLAGS, "--sim-step-base-ms", "15") as engine:
        texts = unbroken(engine.url, wanted)
        with (
            routing("--upstreams", engine.url) as first,
            routing("--upstreams", engine.url) as second,
        ):

            async def half(body: bytes) -> bytes:
                """What came before the router was killed."""
                seen = b""
                async with await RawClient.open(first.port) as client:
                    await client.post(body, PATH, header(0))
                    assert (await client.head()).status == 200
                    try:
                        while piece := await client.chunk():
                            seen += piece
                            begun[body] = seen.count(b"data: ")
                            if len(begun) == len(wanted) and min(begun.values()) >= 5:
                                is_time.set()
                    except (asyncio.IncompleteReadError, ConnectionError):
                        pass
                return up_to_last_event(seen)

            async def play() -> list[bytes]:
                requests = [json.dumps({**body, "stream": True}).encode() for body in wanted]
                halves = [asyncio.create_task(half(body)) for body in requests]
                await is_time.wait()
                first.process.kill()
                seen = await asyncio.gather(*halves)
                assert not any(b"[DONE]" in each for each in seen)
                rest = await asyncio.gather(
                    *(continued(second.port, a, b) for a, b in zip(seen, requests, strict=True))
                )
                return [plain(a + b.body) for a, b in zip(seen, rest, strict=True)]

            begun: dict[bytes, int] = {}
            is_time = asyncio.Event()
            for stream, text in zip(asyncio.run(play()), texts, strict=True):
                events = [json.loads(line[6:]) for line in stream.split(b"\n\n")[:-2]]
                deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
                assert "".join(deltas) == text
                assert len({event["id"] for event in events}) == 1
                assert stream.endswith(b"data: [DONE]\n\n")
