"""How long a client may take, how much it may hold, and what it gets when it goes beyond."""

from __future__ import annotations

from functools import partial

from octavo_router.http.client_connection import HEAD as HEAD_STATE
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.messages import Handler, Inbound, Reply
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def has_sent(connection: ClientConnection, num_bytes: int) -> bool:
    return len(connection._buffer) == num_bytes


async def streamed():
    for word in (b"a", b"bc", b""):
        yield word


def own(request: Inbound) -> Reply:
    match request.path:
        case "/stream":
            return Reply(body=streamed(), content_type="text/plain")
        case "/echo":
            return Reply.json([request.parameter("a"), request.headers.get("x-thing")])
        case "/broken":
            raise RuntimeError("a mistake")
    return Reply.json({"status": "ok"})


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", path): own for path in ("/health", "/stream", "/echo", "/tree/*")
}


@on_loop
async def test_a_client_that_says_nothing_is_let_go():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await rig.until(lambda: len(rig.shared.connections) == 1)
        rig.later(9.5)
        assert [one._state for one in rig.shared.connections] == [HEAD_STATE]
        rig.later(10.0)
        assert await client.ended() == b""


@on_loop
async def test_headers_that_come_too_slowly_are_refused_however_often_a_byte_comes():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await client.send(HEAD)
        await rig.until(lambda: any(one._buffer for one in rig.shared.connections))
        [connection] = rig.shared.connections
        due_at = connection.deadline
        for number in range(1, 6):
            await client.send(b"x")
            await rig.until(partial(has_sent, connection, len(HEAD) + number))
            assert connection.deadline == due_at  # no byte buys time
        rig.later(9.0)
        assert not client.reader._buffer  # type: ignore[attr-defined]  # nothing has come back
        rig.later(10.0)
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "header_timeout")


@on_loop
async def test_a_body_that_comes_too_slowly_is_refused():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await client.send(HEAD + b"content-length: 100\r\n\r\n{")
        await rig.until(lambda: any(one.awaited_bytes for one in rig.shared.connections))
        rig.later(30.0)
        answer = await client.answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert await client.ended() == b""


@on_loop
async def test_an_idle_connection_is_closed_after_a_while():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 200
        rig.later(70.0)
        assert (await client.ask(chat())).status == 200  # and its time begins anew
        rig.later(75.0)
        assert await client.ended() == b""


@on_loop
async def test_one_connection_too_many_is_told_so():
    config = fast_config(limits={"max_connections": 2})
    async with routing_to(1, config=config, routes=ROUTES) as rig:
        first, second = await RawClient.open(rig.port), await RawClient.open(rig.port)
        assert (await first.get("/health")).status == 200
        assert (await second.get("/health")).status == 200
        async with await RawClient.open(rig.port) as third:
            answer = await third.answer()
            assert (answer.status, answer.code) == (503, "too_many_connections")
        first.writer.close()
        await rig.until(lambda: len(rig.shared.connections) == 1)
        async with await RawClient.open(rig.port) as fourth:
            assert (await fourth.get("/health")).status == 200
        second.writer.close()


@on_loop
async def test_own_routes_answer_whole_streamed_and_without_a_body():
    async with routing_to(1, routes=ROUTES) as rig, await RawClient.open(rig.port) as client:
        assert (await client.get("/health")).json == {"status": "ok"}
        head = await client.get("/health", "HEAD")
        assert (head.status, head.header("content-length"), head.body) == (200, "15", b"")
        assert (await client.get("/stream")).body == b"abc"
        answer = await client.get("/echo?a=b%20c", more="x-thing: 1\r\n")
        assert answer.json == ["b c", "1"]
        assert (await client.get("/tree/a/b")).status == 200
        assert (await client.get("/tree")).status == 404
        assert (await client.get("/nope")).code == "route_not_found"
        assert (await client.get("/health", "DELETE")).status == 405
        assert (await client.get("/v1/chat/completions")).status == 405


@on_loop
async def test_paths_that_only_look_like_a_route_are_none():
    async with routing_to(1, routes=ROUTES) as rig, await RawClient.open(rig.port) as client:
        for path in (
            "//health", "/health/", "/./health", "/%68ealth", "/v1/../health", "/HEALTH",
            "/v1/chat/completions/", "/v1//chat/completions", "/v1/load_lora_adapter",
            "/octavo/v1/drain", "/octavo/v1/stream", "/invocations", "/pause",
        ):  # fmt: skip
            assert (await client.get(path, "POST")).status in (404, 405), path


@on_loop
async def test_a_body_that_is_no_json_goes_no_further():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for body in (b"", b"{", b"[]", b'{"a":1,"a":2}', b"\xff", b"[" * 100_000, b'{"a":NaN}'):
            answer = await client.ask(body)
            assert (answer.status, answer.code) == (400, "invalid_json"), body[:20]
        answer = await client.ask({"model": "unknown", "messages": []})
        assert (answer.status, answer.code) == (404, "model_not_found")
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
            b"content-length: 2\r\n\r\n{}"
        )
        assert (await client.answer()).status == 415
        assert (await client.ask(chat())).status == 200  # on the same connection
        assert len(upstream.requests) == 1
        assert [record.code for record in rig.records[:2]] == ["invalid_json"] * 2
        await rig.settled()
