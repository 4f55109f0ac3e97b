"""A key that is taken away stops within seconds: new requests, and what is under way with it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from tests.fakes.facts import until
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event
from tests.router.test_server import configuration, plain_server, running, until_ready

if TYPE_CHECKING:
    from pathlib import Path

KEYS = "keys: [{{tenant: a, key: {0}}}, {{tenant: b, key: other}}]"
OLD, OTHER = "authorization: Bearer old\r\n", "authorization: Bearer other\r\n"


async def endless(peer: Peer, request: Received) -> None:
    if b"/v1/chat" not in request.line:
        await plain_server(peer, request)
        return
    await peer.begin_stream()
    await peer.chunk(event("x"))
    await peer.left()


def write(path: Path, key: str, *, at: int) -> None:
    path.write_text(KEYS.format(key))
    os.utime(path, ns=(at, at))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "idempotency-key: k\r\n"])
@on_loop
async def test_streams_of_a_key_that_is_gone_end_and_those_of_others_go_on(
    tmp_path: Path, more: str
):
    path = tmp_path / "keys.yaml"
    write(path, "old", at=1)
    async with (
        ScriptedUpstream(endless) as upstream,
        running(configuration(upstream.port, keys_file=str(path))) as (app, server),
        await RawClient.open(server.port) as client,
        await RawClient.open(server.port) as idle,
        await RawClient.open(server.port) as other,
    ):
        await until_ready(app)
        assert (await idle.get("/v1/models", more=OLD)).status == 200
        for one, key in ((client, OLD), (other, OTHER)):
            await one.post(chat(stream=True), more=key + more)
            assert (await one.head()).status == 200
            assert b"x" in await one.chunk()
        write(path, "new", at=2)
        async with asyncio.timeout(5.0):  # as promised
            ending = await client.chunk()
            assert b'"code": "invalid_api_key"' in ending
            assert ending.endswith(b"data: [DONE]\n\n")
            assert await client.chunk() == b""
        assert (await idle.get("/v1/models", more=OLD)).status == 401
        new = OLD.replace("old", "new")
        assert (await idle.get("/v1/models", more=new)).status == 200
        assert len(app.proxy.exchanges) == 1  # the other's
        assert not other.reader.at_eof()


@on_loop
async def test_that_keys_are_asked_for_from_now_on_ends_nobody(tmp_path: Path):
    """They came in when nobody was asked for any."""
    path = tmp_path / "keys.yaml"
    async with ScriptedUpstream(endless) as upstream:
        write(path, "old", at=1)
        with_keys = configuration(upstream.port, keys_file=str(path))
        async with (
            running(configuration(upstream.port), load=lambda: with_keys) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            await client.post(chat(stream=True))
            assert (await client.head()).status == 200
            await client.chunk()
            await app.reload()
            assert (await client_of(server.port)) == 401
            assert len(app.proxy.exchanges) == 1


@on_loop
async def test_a_key_that_goes_while_its_body_arrives_is_refused(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    write(path, "old", at=1)
    received: list[bytes] = []

    async def answer(peer: Peer, request: Received) -> None:
        received.append(request.line)
        await plain_server(peer, request)

    async with ScriptedUpstream(answer) as upstream:
        with_keys = configuration(upstream.port, keys_file=str(path))
        async with (
            running(with_keys, load=lambda: with_keys) as (app, server),
            await RawClient.open(server.port) as client,
            await RawClient.open(server.port) as other,
        ):
            await until_ready(app)
            for one, key in ((client, OLD), (other, OTHER)):
                await one.send(post_bytes(chat(), more=key)[:-20])
            await until(lambda: app.awaited_bytes() == 40)
            write(path, "new", at=2)
            await app.reload()
            await client.send(post_bytes(chat())[-20:])
            answered = await client.answer()
            assert (answered.status, answered.code) == (401, "invalid_api_key")
            assert not any(b"/v1/chat" in line for line in received)
            await other.send(post_bytes(chat())[-20:])
            assert (await other.answer()).status == 200
            assert (await client.ask(chat(), more=OLD.replace("old", "new"))).status == 200


async def client_of(port: int) -> int:
    async with await RawClient.open(port) as client:
        return (await client.ask(chat())).status
