"""A mistake in native code is one request's end: no connection stays busy, nothing stays held."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream


@on_loop
async def test_an_exception_of_any_kind_ends_the_connection_that_it_hits():
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: complaints.append(told))
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        async with await RawClient.open(rig.port) as client:
            assert (await client.ask(chat())).status == 200
            lines = rig.upstreams.of(rig.endpoints[0]).lines
            usual, lines.extra = lines.extra, "text where bytes belong"  # type: ignore[assignment]  # the mistake
            await client.post(chat())
            assert await client.ended() == b""
        await rig.settled()
        lines.extra = usual
        async with await RawClient.open(rig.port) as client:
            assert (await client.ask(chat())).status == 200
        assert len(upstream.requests) == 2
