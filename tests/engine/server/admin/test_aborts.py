"""POST /abort_requests: who is stopped, by which names, and what that frees."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import EngineConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.server.app import build_app
from octavo_engine.server.generation.inflight import InFlightRequests
from octavo_engine.server.http.loopback import post
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from octavo_engine.state.outputs import StepOutput

PATH = "/abort_requests"


class Waiting:
    """A request in a thread of its own, whose answer is read later."""

    def __init__(self, server: RunningServer, path: str, body: dict[str, Any]) -> None:
        self._answer: httpx.Response | None = None

        def work() -> None:
            with server.client(headers={"x-request-id": "mine"}) as client:
                self._answer = client.post(path, json=body)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        server.wait_for(server.engine.holding)

    def answer(self) -> httpx.Response:
        self._thread.join(60)
        assert self._answer is not None
        return self._answer


def held(tasks: tuple[str, ...] = ("generate",)) -> FakeEngine:
    return FakeEngine(tasks=tasks, hold_after=2)


@pytest.mark.parametrize("name", ["mine", "cmpl-mine", "engine's own"])
def test_a_generation_ends_with_what_it_has(name):
    with running(held()) as server, server.client() as client:
        waiting = Waiting(server, "/v1/completions", {"prompt": "a", "max_tokens": 9})
        own = server.engine.requests[0][2]["request_id"]
        given = own if name.startswith("engine") else name
        reported = client.post(PATH, json={"request_ids": [given, "other"]}).json()
        answer = waiting.answer()

    assert reported == {"aborted": 1, "not_found": ["other"]}
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("abort", 2)


def test_texts_to_embed_end_with_an_error_that_no_client_tries_again():
    with running(held(("embed",))) as server, server.client() as client:
        waiting = Waiting(server, "/v1/embeddings", {"input": "a"})
        reported = client.post(PATH, json={"request_ids": "mine"}).json()
        answer = waiting.answer()

    assert reported["aborted"] == 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
    assert server.engine.aborted[0].startswith("embd-mine-")


def test_a_batch_of_conversations_ends_as_a_whole():
    body = {"messages": [[{"role": "user", "content": "x"}]] * 2, "max_tokens": 9}
    with running(held()) as server, server.client() as client:
        waiting = Waiting(server, "/v1/chat/completions/batch", body)
        client.post(PATH, json={"request_ids": ["chatcmpl-mine"]})
        answer = waiting.answer()
    assert [c["finish_reason"] for c in answer.json()["choices"]] == ["abort", "abort"]


def test_what_has_ended_is_not_found():
    with running() as server, server.client() as client:
        done = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["id"]
        reported = client.post(PATH, json={"request_ids": [done, done]}).json()
        assert reported == {"aborted": 0, "not_found": [done]}
        assert len(server.service.running) == 0


@pytest.mark.parametrize("body", [{}, {"request_ids": 1}, {"request_ids": ["a", 2]}])
def test_other_bodies_are_refused(body):
    with running() as server, server.client() as client:
        answer = client.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("request_ids")


def test_requests_that_share_a_name_are_all_stopped():
    async def story() -> list[int]:
        stopped: list[int] = []
        names = InFlightRequests()

        async def stop(number: int) -> None:
            stopped.append(number)

        with (
            names.track(("a", "b"), lambda: stop(1)),
            names.track(("a", "c"), lambda: stop(2)),
        ):
            assert await names.stop("a") == 2
            assert await names.stop("c") == 1
            assert await names.stop("d") == 0
        assert len(names) == 0
        return stopped

    assert asyncio.run(story()) == [1, 2, 2]


class Steps:
    """Wakes who waits for something that a step brings about. A StepListener."""

    def __init__(self) -> None:
        self._stepped = asyncio.Event()

    def on_step(self, step: StepOutput) -> None:
        self._stepped.set()

    def on_lost(self) -> None:
        self._stepped.set()

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                self._stepped.clear()
                await self._stepped.wait()


def test_an_abort_gives_the_blocks_back():
    """Through the real engine: its pool is as empty afterwards as before."""

    async def story() -> tuple[int, int, str]:
        config = EngineConfig(model="m", device="sim", sim=SimConfig(time_scale=0.2))
        engine = await AsyncEngine.start(config)
        try:
            await engine.ready()
            app = build_app(engine, ServerSettings())
            steps = Steps()
            engine.residency.listen(steps)
            body = b'{"prompt":"abc","max_tokens":2000,"ignore_eos":true,"request_id":"long"}'
            waiting = asyncio.create_task(post(app, "/v1/completions", body))
            await steps.until(lambda: engine.stats.kv_blocks_used > 0)
            most = engine.stats.kv_blocks_used
            await post(app, PATH, b'{"request_ids":["long"]}')
            answer = await waiting
            await steps.until(lambda: engine.stats.kv_blocks_used == 0)
            return most, engine.stats.num_running, answer.json()["choices"][0]["finish_reason"]
        finally:
            await engine.stop()

    most, still_running, reason = asyncio.run(story())
    assert most > 0
    assert (still_running, reason) == (0, "abort")
