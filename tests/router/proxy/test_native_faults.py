"""A mistake in native code ends one connection, as one in Python does: nobody waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT, ScriptedUpstream


@pytest.fixture(autouse=True)
def native(way: bool) -> None:
    if not way:
        pytest.skip("there is no native code on the long way")


@on_loop
async def test_an_exception_of_native_code_ends_its_connection():
    problems: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: problems.append(context["message"]))
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        async with await RawClient.open(rig.port) as client:
            assert (await client.ask(chat())).json == CHAT
            [connection] = rig.shared.connections
            cast("Any", connection)._memo = "no bytes"  # at which the lane throws one of its own
            await client.post(chat())
            assert await client.reader.read() == b""
        assert problems == ["A connection's protocol broke"]
        async with await RawClient.open(rig.port) as other:
            assert (await other.ask(chat())).json == CHAT
        await rig.settled()
        await rig.until(lambda: not rig.shared.connections)
