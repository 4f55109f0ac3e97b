"""LLMDeployments for the page: read where the router may, silently absent where it may not."""

from __future__ import annotations

import asyncio
import json

from octavo_router.console.deployments import EVERY_S, Deployments
from octavo_router.discovery.kubernetes.account import at_url
from tests.fakes.clock import ManualClock
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream

ITEM = {
    "metadata": {"name": "smollm2", "namespace": "chat"},
    "spec": {"anything": 1},
    "status": {
        "replicas": 2,
        "readyReplicas": 1,
        "loading": {"phase": "Fetching", "percent": 40, "more": True},
        "conditions": [
            {"type": "Progressing", "status": "True", "reason": "Rolling", "message": "…"},
            {"type": "Ready", "status": "False", "reason": "ModelLoading", "message": "1 of 2"},
        ],
    },
}


async def ask_twice(server: ScriptedUpstream, clock: ManualClock) -> list[dict[str, object]]:
    """What is known once the first question was answered."""
    deployments = Deployments(at_url(f"http://127.0.0.1:{server.port}"), ["chat"], now=clock)
    assert deployments.rows() == []  # never waits
    assert deployments._asking is not None
    await deployments._asking
    return deployments.rows()


@on_loop
async def test_a_row_says_how_it_is_and_why():
    paths: list[bytes] = []

    async def api(peer: Peer, request: Received) -> None:
        paths.append(request.line.split(b" ")[1])
        await peer.answer(json.dumps({"items": [ITEM, {"metadata": {"name": "new"}}]}).encode())

    async with ScriptedUpstream(api) as server:
        row, new = await ask_twice(server, ManualClock())
    assert paths == [b"/apis/octavo.dev/v1alpha1/namespaces/chat/llmdeployments?limit=200"]
    assert row == {
        "namespace": "chat", "name": "smollm2", "ready": "False", "reason": "ModelLoading",
        "message": "1 of 2", "replicas": 2, "ready_replicas": 1, "phase": "Fetching", "percent": 40,
    }  # fmt: skip
    assert (new["name"], new["ready"], new["replicas"]) == ("new", "", 0)


@on_loop
async def test_it_asks_again_only_after_a_while():
    requested = 0

    async def api(peer: Peer, request: Received) -> None:
        nonlocal requested
        requested += 1
        await peer.answer(b'{"items": []}')

    clock = ManualClock()
    async with ScriptedUpstream(api) as server:
        deployments = Deployments(at_url(f"http://127.0.0.1:{server.port}"), ["*"], now=clock)
        for _ in range(3):
            deployments.rows()
            if deployments._asking is not None:
                await deployments._asking
        assert requested == 1
        clock.advance(EVERY_S)
        deployments.rows()
        assert isinstance(deployments._asking, asyncio.Task)
        await deployments._asking
        assert requested == 2


@on_loop
async def test_without_the_right_or_with_nonsense_there_is_none():
    for body, status in ((b"{}", "403 Forbidden"), (b"[1]", "200 OK"), (b"no", "200 OK")):

        async def api(peer: Peer, request: Received, body=body, status=status) -> None:
            await peer.answer(body, status=status)

        async with ScriptedUpstream(api) as server:
            assert await ask_twice(server, ManualClock()) == []
