"""Two engines of ours work on one request at once: one computes the prompt, the other one fetches
its blocks meanwhile and answers.

Red when: the answering engine is sent the request only once the prompt is computed; what becomes of
the prompt's engine changes the answer; a prompt goes on for a client that has left.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from octavo_router.proxy.prefill_decode.kv_transfer import with_engine
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, closed_port, fixed
from tests.router.proxy.prefill_decode.test_handover import COMPUTED, LONG, counted, paired

if TYPE_CHECKING:
    from tests.fakes.router_rig import Rig

FOLLOWED = {
    "do_remote_prefill": True,
    "remote_is_computing": True,
    "remote_host": "10.0.0.7",
    "remote_port": 14579,
}


def make_ours(rig: Rig) -> None:
    for endpoint in rig.registry.endpoints.values():
        endpoint.kind, endpoint.kv_follows = "octavo", True
        is_prefill = endpoint.spec.role == "prefill"
        endpoint.kv_role = "kv_producer" if is_prefill else "kv_consumer"
        endpoint.kv_address = "10.0.0.7:14579" if is_prefill else ""
        rig.registry.changed(endpoint)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.7:1", "10.0.0.7", 1), ("[fd00::7]:14579", "fd00::7", 14579)],
)
def test_the_body_names_the_engine_that_computes(address: str, host: str, port: int):
    body = json.loads(with_engine(b'{"model": "m"} \n', address))
    assert body == {
        "model": "m",
        "kv_transfer_params": FOLLOWED | {"remote_host": host, "remote_port": port},
    }


@on_loop
async def test_both_engines_have_the_request_at_once():
    may_compute = asyncio.Event()

    async def computes(peer: Peer, request: Received) -> None:
        assert request.json["kv_transfer_params"]["do_remote_decode"] is True
        await may_compute.wait()
        await peer.answer(COMPUTED)

    async def answers(peer: Peer, request: Received) -> None:
        may_compute.set()  # it has the request before the prompt is computed
        await rig.until(lambda: counted(rig) == {"ok": 1})
        assert rig.endpoints[0].pending_tokens == 0  # nothing of the prompt is to be done there
        await fixed(peer, request)

    async with (
        ScriptedUpstream(answers) as decode,
        ScriptedUpstream(computes) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        make_ours(rig)
        body = chat(LONG)
        assert (await client.ask(body)).json == CHAT
        assert decode.requests[0].json == {**body, "kv_transfer_params": FOLLOWED}


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("is full", "refused"), ("breaks", "error_5xx"), ("dies", "broken"),
        ("is closed", "connect_failed"),
    ],
)  # fmt: skip
@on_loop
async def test_whatever_happens_to_the_prompt_the_answer_goes_on(how: str, outcome: str):
    async def failing(peer: Peer, request: Received) -> None:
        match how:
            case "is full":
                await peer.answer(b"{}", status="503 Service Unavailable")
            case "breaks":
                await peer.answer(b"{}", status="500 Internal Server Error")
            case _:
                peer.reset()

    async def answers(peer: Peer, request: Received) -> None:
        await rig.until(lambda: counted(rig) == {outcome: 1})
        await fixed(peer, request)

    async with (
        ScriptedUpstream(answers) as decode,
        ScriptedUpstream(failing) as prefill,
        paired(
            decode, prompts=(closed_port() if how == "is closed" else prefill.port,)
        ) as rig,
        await RawClient.open(rig.port) as client,
    ):  # fmt: skip
        make_ours(rig)
        assert (await client.ask(chat(LONG))).json == CHAT
        assert len(decode.requests) == 1  # it computes the prompt itself, and is not asked again
        await rig.settled()
        assert [record.outcome for record in rig.records] == ["ok"]


@on_loop
async def test_a_prompt_is_cancelled_once_the_answer_is_there():
    async def waiting(peer: Peer, request: Received) -> None:
        await peer.left()

    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(waiting) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        make_ours(rig)
        assert (await client.ask(chat(LONG))).json == CHAT
        await rig.until(lambda: all(peer.has_left.is_set() for peer in prefill.peers))
        assert rig.registry.endpoints["p0"].in_flight == 0


@on_loop
async def test_a_client_that_leaves_takes_both_along():
    async def waiting(peer: Peer, request: Received) -> None:
        await peer.left()

    async with (
        ScriptedUpstream(waiting) as decode,
        ScriptedUpstream(waiting) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
    ):
        make_ours(rig)
        async with await RawClient.open(rig.port) as client:
            await client.post(chat(LONG))
            await rig.until(lambda: len(prefill.requests) == len(decode.requests) == 1)
        await rig.settled()
        peers = [*prefill.peers, *decode.peers]
        await rig.until(lambda: all(peer.has_left.is_set() for peer in peers))


@on_loop
async def test_an_answering_engine_that_dies_is_replaced_with_the_prompt_anew():
    async def dies(peer: Peer, request: Received) -> None:
        await rig.until(lambda: len(prefill.requests) == 1)
        await peer.answer(b"{}", status="503 Service Unavailable")

    async with (
        ScriptedUpstream(dies) as first,
        ScriptedUpstream() as second,
        ScriptedUpstream(fixed) as prefill,
        paired(first, second, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        make_ours(rig)
        rig.endpoints[1].token_s *= 1e9
        assert (await client.ask(chat(LONG))).json == CHAT
        assert second.requests[0].json["kv_transfer_params"] == FOLLOWED
        assert len(prefill.requests) == 2
