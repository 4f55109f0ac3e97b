"""Pages in browsers may call where their origin was named, and nowhere else."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import KeyConfig, RouterConfig, ServerConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.flow.keys import make_table
from octavo_router.http.cors import Cors
from octavo_router.http.request_head import HeadRules
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import Rig, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

APP = "https://app.example"
ORIGIN = f"origin: {APP}\r\n"
TABLE = make_table([KeyConfig(tenant="a", key="k")], {})
KEY = "authorization: Bearer k\r\n"


@asynccontextmanager
async def opened_to(port: int, *origins: str, **more: Any) -> AsyncIterator[Rig]:
    server = ServerConfig(allowed_origins=origins, **more)
    config = replace(RouterConfig(), server=server)
    async with routing_to(port, config=config, table=TABLE) as rig:
        rules = HeadRules(answer_lines=Cors(server).answer_lines if origins else None)
        rig.shared._rules = rules
        rig.shared.reconfigure(config.limits, config.timeouts, max_connections=100)
        yield rig


def preflight(origin: str, method: str = "POST", headers: str = "authorization") -> bytes:
    return (
        f"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\n"
        f"access-control-request-method: {method}\r\n"
        f"access-control-request-headers: {headers}\r\n\r\n"
    ).encode()


async def with_its_own(peer: Peer, request: Received) -> None:
    """As a plain server that lets in all pages of its own accord."""
    assert request.header("origin") is None
    await peer.answer(b'{"a": 1}', more="access-control-allow-origin: *\r\n")


def allowed(answer: Any) -> list[str]:
    return [value for name, value in answer.headers if name == "access-control-allow-origin"]


@on_loop
async def test_a_page_asks_first_and_needs_no_key_for_that():
    async with ScriptedUpstream() as upstream, opened_to(upstream.port, APP) as rig:
        async with await RawClient.open(rig.port) as client:
            await client.send(preflight(APP, headers="authorization, x-custom"))
            answer = await client.answer()
            assert (answer.status, allowed(answer)) == (204, [APP])
            assert answer.header("access-control-allow-methods") == "POST"
            assert answer.header("access-control-allow-headers") == "authorization, x-custom"
            assert answer.header("vary") == "origin"
            for refused in (preflight("https://evil.example"), preflight(APP, "PUT")):
                await client.send(refused)
                answer = await client.answer()
                assert (answer.status, answer.code) == (400, "invalid_header")
        assert upstream.requests == []


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_each_answer_names_the_origin(stream: bool):
    async with ScriptedUpstream() as upstream, opened_to(upstream.port, APP) as rig:
        async with await RawClient.open(rig.port) as client:
            for _ in range(2):
                answer = await client.ask(chat(stream=stream), more=ORIGIN + KEY)
                assert (answer.status, allowed(answer)) == (200, [APP])
                assert "x-request-id" in (answer.header("access-control-expose-headers") or "")
            refused = await client.ask(chat(), more=ORIGIN)
            assert (refused.status, allowed(refused)) == (401, [APP])
            plain = await client.ask(chat(stream=stream), more=KEY)
            assert (plain.status, allowed(plain)) == (200, [])
            other = await client.ask(chat(), more="origin: https://evil.example\r\n" + KEY)
            assert (other.status, allowed(other)) == (200, [])
        async with await RawClient.open(rig.port) as client:
            await client.send(post_bytes(b"", more=ORIGIN + KEY).replace(b": 0\r", b": 99999999\r"))
            answer = await client.answer()
            assert (answer.status, allowed(answer)) == (413, [APP])


@on_loop
async def test_without_origins_there_is_no_trace_of_it_whatever_an_engine_says():
    async with (
        ScriptedUpstream(with_its_own) as upstream,
        opened_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(), more=ORIGIN + KEY)
        assert (answer.status, allowed(answer)) == (200, [])
        await client.send(preflight(APP))
        assert (await client.answer()).status == 405


@on_loop
async def test_a_star_is_for_all_and_an_engines_word_is_not_repeated():
    async with (
        ScriptedUpstream(with_its_own) as upstream,
        opened_to(upstream.port, "*") as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(), more=ORIGIN + KEY)
        assert (answer.status, allowed(answer)) == (200, ["*"])


def test_cookies_of_any_page_are_not_let_in():
    with pytest.raises(ConfigInvalid, match="allow_credentials"):
        RouterConfig(server=ServerConfig(allowed_origins=("*",), allow_credentials=True))
