"""Servers of several owners behind one router: each is shown its own key, below its own path."""

from __future__ import annotations

from dataclasses import replace

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream
from tests.router.test_server import configuration, plain_server, running, until_ready


async def below_any_path(peer: Peer, request: Received) -> None:
    await plain_server(peer, replace(request, line=request.line.replace(b"/openai", b"", 1)))


async def below_any_other(peer: Peer, request: Received) -> None:
    await plain_server(peer, replace(request, line=request.line.replace(b"/free", b"", 1)))


@on_loop
async def test_each_upstream_is_shown_its_own_key_below_its_own_path():
    async with (
        ScriptedUpstream(plain_server) as ours,
        ScriptedUpstream(below_any_path) as theirs,
        ScriptedUpstream(below_any_other) as others,
    ):
        text = f"""
discovery:
  engine_key: ours
  upstreams:
    - {{url: 'http://127.0.0.1:{ours.port}', names: [a]}}
    - {{url: 'http://127.0.0.1:{theirs.port}/openai/v1', names: [b], pool: b, key: theirs}}
    - {{url: 'http://127.0.0.1:{others.port}/free', names: [c], pool: c, is_foreign: true}}
"""
        async with (
            running(configuration(text=text)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            for _ in range(3):  # a new connection, and kept ones
                for model, upstream, prefix, key in (
                    ("a", ours, "", "Bearer ours"),
                    ("b", theirs, "/openai", "Bearer theirs"),
                    ("c", others, "/free", None),
                ):
                    body = chat() | {"model": model}
                    answer = await client.ask(body, more="authorization: Bearer client\r\n")
                    assert (answer.status, answer.json) == (200, CHAT)
                    received = upstream.requests[-1]
                    assert received.line == f"POST {prefix}/v1/chat/completions HTTP/1.1".encode()
                    assert received.header("authorization") == key
        assert {one.header("authorization") for one in ours.requests} == {"Bearer ours"}
        polled = {one.line: one.header("authorization") for one in theirs.requests}
        assert polled[b"GET /openai/v1/models HTTP/1.1"] == "Bearer theirs"
        assert {one.header("authorization") for one in others.requests} == {None}
