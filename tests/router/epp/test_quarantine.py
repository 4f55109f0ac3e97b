"""Requests that engines die of, behind a gateway: two deaths, then they are refused."""

from __future__ import annotations

import json
from hashlib import blake2b

import pytest

from tests.fakes.envoy import body_message, headers_message, picking
from tests.fakes.router_rig import on_loop

BODY = json.dumps({"model": "model", "prompt": "poison", "stream": True}).encode()
COMPLETIONS = {":path": "/v1/completions"}


def refused(answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


async def dies(rig, *, after_bytes: bool = False) -> list[str]:
    """A request during which its engine dies. The destinations that the gateway was given."""
    async with rig.open() as gateway:
        destinations: list[str] = (await gateway.post(BODY, headers=COMPLETIONS)).destinations
        await gateway.body()
        if after_bytes:
            await gateway.ask(headers_message(3, {":status": "200"}))
            await gateway.ask(body_message(5, b"data: x\n\n", is_end=False))
        [endpoint] = [e for e in rig.endpoints if e.spec.address.authority == destinations[0]]
        rig.registry.report(endpoint, "down", "its connection was lost")
    await rig.settled()
    return destinations


@pytest.mark.parametrize("after_bytes", [False, True])
@on_loop
async def test_two_engines_die_of_a_request_and_no_third(after_bytes):
    async with picking(4, fallbacks=2) as rig:
        first = await dies(rig, after_bytes=after_bytes)
        assert len(first) == 3
        second = await dies(rig, after_bytes=after_bytes)
        assert len(second) == 1  # the gateway must not try others with it
        assert second[0] != first[0]
        digest = blake2b(BODY, digest_size=16).hexdigest()
        assert rig.quarantined == [("/v1/completions", digest)]
        for _ in range(2):
            async with rig.open() as gateway:
                answer = await gateway.post(BODY, headers=COMPLETIONS)
                assert refused(answer) == (422, "request_quarantined")
        assert [e.state for e in rig.endpoints].count("ready") == 2
        async with rig.open() as gateway:  # other requests are served
            other = BODY.replace(b"poison", b"harmless")
            assert (await gateway.post(other, headers=COMPLETIONS)).destinations


@on_loop
async def test_a_client_that_leaves_is_no_death():
    async with picking(2) as rig:
        for _ in range(3):
            async with rig.open() as gateway:
                assert (await gateway.post(BODY, headers=COMPLETIONS)).destinations
            await rig.settled()
        assert rig.quarantined == []


@on_loop
async def test_an_answer_clears_a_request_that_an_engine_died_with():
    async with picking(3) as rig:
        await dies(rig)
        async with rig.open() as gateway:
            await gateway.post(BODY, headers=COMPLETIONS)
            await gateway.body()
            await gateway.response([b"data: [DONE]\n\n"])
        await rig.settled()
        assert len(await dies(rig)) == 2  # with a fallback, as any request
        assert rig.quarantined == []
