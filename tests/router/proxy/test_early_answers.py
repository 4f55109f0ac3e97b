"""Who is answered before it has said all gets its answer, and nobody after it gets another's."""

from __future__ import annotations

import pytest

from tests.fakes.hasty import ANSWERS, LONG, Mistaken, listening
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT


@pytest.mark.parametrize("how", ANSWERS)
@on_loop
async def test_a_connection_with_unsent_bytes_is_not_used_again(how: str):
    async with (
        listening(Mistaken(ANSWERS[how])) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as one,
        await RawClient.open(rig.port) as other,
    ):
        await one.send(post_bytes(chat("x" * LONG)))
        answer = await one.answer()
        assert (answer.status, answer.json) == (200, CHAT)
        assert rig.upstreams.of(rig.endpoints[0]).pool.num_idle == 0
        upstream.reads_on.set()
        assert (await other.ask(chat())).json == CHAT
        await rig.settled()
