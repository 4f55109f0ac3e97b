"""A stream that fails after its 200 counts as failed: in metrics, for canaries, in the log."""

from __future__ import annotations

import asyncio

import pytest

from octavo_engine.protocol import metric_names as names
from octavo_engine.protocol.resume import begin_line, token_line
from octavo_router.errors import Rejected
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event

BEGIN = begin_line(id="c-1", created=1, seed=7, answers=1, prompt_tokens=4, cached=0)
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def counted(rig: Rig) -> dict[tuple[str, str], int]:
    """By code and outcome."""
    page, _ = rig.metrics.render()
    assert f"{names.ROUTER_REQUESTS}_total".encode() in page
    found: dict[tuple[str, str], int] = {}
    for (_, _, code, _, outcome), count in rig.metrics.requests.items():
        found[code, outcome] = found.get((code, outcome), 0) + count
    return found


@pytest.mark.parametrize("how", ["close", "reset", "stall", "garbage"])
def test_a_stream_that_breaks_in_the_middle(how):
    is_seen = asyncio.Event()

    async def breaks(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(event("a"))
        await is_seen.wait()
        if how == "close":
            peer.close()
        elif how == "reset":
            peer.reset()
        elif how == "garbage":
            await peer.send(b"zz\r\n")
        else:
            await peer.left()

    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream(breaks) as upstream,
            routing_to(upstream.port) as rig,
            await RawClient.open(rig.port) as client,
        ):
            await client.post(chat(stream=True))
            assert (await client.head()).status == 200
            await client.chunk()
            is_seen.set()
            if how == "stall":
                await rig.given_up(rig.endpoints[0], after_s=31.0)
            assert b'"error"' in await client.chunk()
            await rig.settled()
            assert counted(rig) == {("200", "failed"): 1}
            [record] = rig.records
            assert record.is_error
            revision = rig.metrics.pool("default").revision("")
            assert (revision.requests, revision.errors) == (1, 1)

    ask()


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("model_error", "failed"), ("internal_error", "failed"), ("deadline_exceeded", "failed"),
     ("grammar_dead_end", "rejected"), ("aborted", "rejected")],
)  # fmt: skip
def test_a_stream_that_its_engine_ends_with_an_error(code, outcome):
    async def gives_up(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(BEGIN + token_line(0, [1]) + WORD)
        await peer.chunk(b'data: {"error":{"code":"%b"}}\n\n' % code.encode())
        await peer.chunk(b"data: [DONE]\n\n")
        await peer.end_stream()

    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream(gives_up) as upstream,
            routing_to(upstream.port, kind="octavo") as rig,
            await RawClient.open(rig.port) as client,
        ):
            answer = await client.ask(chat(stream=True))
            assert code.encode() in answer.body
            await rig.settled()
            assert counted(rig) == {("200", outcome): 1}

    ask()


PLAIN_ERRORS = [
    (b'{"error": {"message": "x", "type": "InternalServerError", "code": 500}}', "failed"),
    (b'{"error": {"message": "x", "type": "server_error"}}', "failed"),
    (b'{"type": "error", "error": {"type": "api_error", "message": "x"}}', "failed"),
    (b'{"error": {"message": "x", "type": "BadRequestError", "code": 400}}', "rejected"),
    (b'{"error": {"message": "x", "type": "invalid_request_error"}}', "rejected"),
    (b'{"choices": [{"delta": {"content": "an \\"error\\""}}]}', "ok"),
    (b'{"error": null, "choices": []}', "ok"),
    (b'{"error"', "ok"),
]


@pytest.mark.parametrize("ending", [b"data: [DONE]\n\n", b""])
@pytest.mark.parametrize(("data", "outcome"), PLAIN_ERRORS)
def test_a_stream_that_a_plain_server_ends_with_an_error(data, outcome, ending):
    """The client has the error already; it counts all the same, and against the server."""

    async def gives_up(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(WORD)
        await peer.chunk(b"event: error\ndata: %b\n\n%b" % (data, ending))
        await peer.end_stream()

    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream(gives_up) as upstream,
            routing_to(upstream.port) as rig,
            await RawClient.open(rig.port) as client,
        ):
            reported: list[str] = []
            rig.proxy.dispatcher.on_result = (  # type: ignore[attr-defined]
                lambda pool, result: reported.append(result.value)
            )
            answer = await client.ask(chat(stream=True))
            assert data in answer.body
            await rig.settled()
            assert counted(rig) == {("200", outcome): 1}
            expected = {"failed": "error_5xx", "rejected": "rejected", "ok": "ok"}
            assert reported == [expected[outcome]]

    ask()


@on_loop
async def test_a_whole_answer_too_large_to_be_kept_that_breaks():
    async def breaks(peer: Peer, request: Received) -> None:
        head = (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
        )
        await peer.send(head.encode() + b" " * 2_000_000)
        peer.close()

    async with (
        ScriptedUpstream(breaks) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat())
        assert (await client.head()).status == 200
        await client.ended()
        await rig.settled()
        assert counted(rig) == {("200", "failed"): 1}


@on_loop
async def test_what_is_nobody_s_failure_is_not_counted_as_one():
    async def answers(peer: Peer, request: Received) -> None:
        match request.json["messages"][0]["content"]:
            case "bad":
                await peer.answer(b'{"error":{}}', status="400 Bad Request")
            case "wait":
                await peer.begin_stream()
                await peer.chunk(event("a"))
                await peer.left()
            case _:
                await peer.answer(b'{"choices":[]}')

    async with (
        ScriptedUpstream(answers) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as leaver,
    ):
        await client.ask(chat("fine"))
        await client.ask(chat("bad"))
        await leaver.post(chat("wait", stream=True))
        await leaver.head()
        leaver.reset()
        await rig.settled()
        assert counted(rig) == {("200", "ok"): 1, ("400", "rejected"): 1, ("0", "gone"): 1}
        assert not any(record.is_error for record in rig.records)


@on_loop
async def test_a_stream_that_the_router_itself_ends():
    async def waits(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(event("a"))
        await peer.left()

    async with (
        ScriptedUpstream(waits) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat(stream=True))
        await client.head()
        await client.chunk()
        for exchange in list(rig.proxy.exchanges):
            exchange.shut_down(Rejected(503, "server_shutdown", "Over.", close=True))
        await rig.settled()
        assert counted(rig) == {("200", "failed"): 1}
