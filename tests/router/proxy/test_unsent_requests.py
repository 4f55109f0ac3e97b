"""An engine answers before it has read the request: what is still to be sent is nobody else's."""

from __future__ import annotations

import pytest

from tests.fakes.hasty import ANSWERS, Deaf, Hasty, listening
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT

LARGE = chat(messages=[{"role": "user", "content": "x" * 7_000_000}])


@pytest.mark.parametrize("pieces", ANSWERS.values(), ids=list(ANSWERS))
@on_loop
async def test_a_connection_with_a_part_of_a_request_still_to_send_serves_nobody_else(
    pieces: list[bytes],
):
    async with (
        listening(Hasty(pieces)) as hasty,
        routing_to(hasty.port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as other,
    ):
        for _ in range(2):  # the second time with a head that is known
            answer = await client.ask(LARGE)
            assert (answer.status, answer.json) == (200, CHAT)
            pool = rig.upstreams.of(rig.endpoints[0]).pool
            assert pool.num_idle == 0
            before = hasty.num_connections
            assert (await other.ask(chat())).status == 200
            assert hasty.num_connections == before + 1
            pool._close_idle()
        await rig.settled()


@on_loop
async def test_a_connection_whose_request_has_left_is_kept():
    async with (
        listening(Hasty()) as hasty,
        routing_to(hasty.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.ask(chat())
        before = hasty.num_connections
        for _ in range(3):
            assert (await client.ask(chat())).status == 200
        assert hasty.num_connections == before
        await rig.settled()


@on_loop
async def test_a_connection_that_was_kept_before_is_not_kept_with_a_part_still_to_send():
    """Native code takes these: the connection is there, and the answer's head is known."""
    async with (
        listening(Deaf()) as deaf,
        routing_to(deaf.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(3):
            assert (await client.ask(chat())).status == 200
        pool = rig.upstreams.of(rig.endpoints[0]).pool
        assert (pool.num_idle, deaf.num_connections) == (1, 1)
        assert (await client.ask(LARGE)).json == CHAT
        assert (pool.num_idle, deaf.num_connections) == (0, 1)
        assert (await client.ask(chat())).status == 200
        assert deaf.num_connections == 2
        deaf.reads_on.set()
        await rig.settled()
