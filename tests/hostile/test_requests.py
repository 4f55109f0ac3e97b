"""Generated requests to all operations end with a described kind of answer: a share of `make fuzz`.

Red when: a request never ends, an answer is an internal error or no error object, a block is left.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.router_process import routing
from tests.fakes.simulated import simulating
from tests.hostile import requests

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_generated_requests_are_answered_and_leave_nothing_behind(tmp_path: Path) -> None:
    settings = ServerSettings(dev_mode=True, tokenizer_info=True, files_dir=str(tmp_path))
    with simulating(settings=settings) as server:
        counts = requests.fuzz(server, count=20_000, seconds=25.0, seed=1)
    assert counts.tried > 1000
    assert min(counts.statuses[200], counts.statuses[400]) > counts.tried // 10
    assert 500 not in counts.statuses


@pytest.mark.slow
def test_generated_requests_through_a_router_are_answered(tmp_path: Path) -> None:
    with simulating() as server, routing("--upstreams", server.url) as router:
        router.until(lambda: "ready" in router.states().values())
        counts = requests.fuzz(server, count=5_000, seconds=20.0, seed=2, router=router)
        assert router.metric("octavo_router_requests_total", code="500") == 0
    assert counts.tried > 300
    assert counts.statuses[200] > counts.tried // 20


def test_it_finds_what_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    async def internal(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    monkeypatch.setattr(requests, "TIMEOUT_S", 0.2)
    request = requests.Request("POST", "/v1/completions", b"{}", [])
    for app, what in ((broken, "KeyError"), (silent, "not end"), (internal, "500"), (bare, "JSON")):
        with pytest.raises(requests.BadAnswer, match=what):
            asyncio.run(
                requests.check(partial(requests.call, app), request, requests.RequestCounts())
            )
