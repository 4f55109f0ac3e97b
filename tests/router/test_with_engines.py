"""The whole as its users run it: engines and a router as processes, and engines that die.

What a client gets is compared with what an engine says that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes.router_process import StreamResult, stream, streams

if TYPE_CHECKING:
    from tests.fakes.router_process import RouterProcess
    from tests.router.conftest import Platform

pytestmark = pytest.mark.slow

WORDS = [
    "amber",
    "apple",
    "april",
    "arrow",
    "bloom",
    "brave",
    "bread",
    "brook",
    "cabin",
    "candy",
    "cedar",
    "chalk",
    "cloud",
]
PATH = "/v1/chat/completions"
CHUNK_TOKENS = 64  # what a route key stands for, in the simulator's tokens: they are bytes


def prose(number: int, num_words: int) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def bodies(count: int, *, max_tokens: int = 40, start: int = 0) -> list[dict[str, Any]]:
    """Greedy and seeded ones, long and short: with 3 words there are no route keys."""
    made = []
    for number in range(start, start + count):
        content = prose(number, (3, 30, 100)[number % 3])
        how = {"temperature": 0} if number % 2 else {"seed": number}
        made.append(
            {
                "model": "sim",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": max_tokens,
                **how,
            }
        )
    return made


def unbroken(url: str, wanted: list[dict[str, Any]]) -> list[str]:
    """What an engine says to these, asked itself and one by one in no stream."""

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            answers = await asyncio.gather(*(client.post(PATH, json=body) for body in wanted))
        return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    return asyncio.run(ask())


def all_whole(reported: list[StreamResult], texts: list[str]) -> None:
    """Every client got the text it would have got, once, under one id."""
    for one, text in zip(reported, texts, strict=True):
        assert (one.status, one.errors, one.ends, one.is_done) == (200, [], ["length"], True), one
        assert one.text == text
        assert len(one.ids) == 1


def is_reported(router: RouterProcess, body: dict[str, Any], num_tokens: int) -> None:
    """Waits until the router knows of a prefix, but for what fills no chunk of 64 bytes."""
    router.until(lambda: router.would_match(body) > num_tokens - CHUNK_TOKENS)


def test_a_conversation_stays_where_its_prefix_is(platform: Platform):
    router = platform.router
    messages = [{"role": "user", "content": prose(1000, 120)}]
    where = set()
    for turn in range(5):
        body = {"model": "sim", "messages": messages, "max_tokens": 8, "seed": 1}
        answer = router.client.post(PATH, json=body, headers={"x-octavo-explain": "1"})
        why = json.loads(answer.headers["x-octavo-explain"])
        usage = answer.json()["usage"]
        where.add(answer.headers["x-served-by"])
        assert why["endpoint"].endswith(answer.headers["x-served-by"])
        if turn:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert why["matched_tokens"] > 500
            assert 0 <= cached - why["matched_tokens"] <= CHUNK_TOKENS
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go"}]
        is_reported(router, {**body, "messages": messages}, usage["prompt_tokens"])
    assert len(where) == 1


def test_hints_for_the_kv_cache_reach_the_engines_that_answer(platform: Platform):
    content = prose(9, 100)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "model": "sim"}
    control = {"type": "ephemeral", "ttl": "1h"}
    url = platform.router.url + PATH
    bad = httpx.post(url, json=body | {"cache_control": {"type": "ephemeral", "ttl": "x"}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "cache_control.ttl")
    assert httpx.post(url, json=body | {"cache_control": control}).status_code == 200
    ahead = body | {"prefetch": True}
    assert httpx.post(url, json=ahead).json()["usage"]["completion_tokens"] == 0
    lines = httpx.post(url, json=ahead | {"stream": True}).text.splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    [reason] = [
        r
        for line in lines
        if line.startswith("data: {")
        for c in json.loads(line[6:])["choices"]
        if (r := c["finish_reason"])
    ]
    assert reason == "length"


def test_predicted_and_actual_hits_agree_also_where_nobody_asked_for_usage(platform: Platform):
    """The counters of a router that only relayed streams, some with and some without usage."""
    with platform.another_router() as router:
        for number in range(4):
            messages = [{"role": "user", "content": prose(2000 + number, 30 + 40 * number)}]
            body: dict[str, Any] = {"model": "sim", "messages": messages, "max_tokens": 6}
            if number % 2:
                body["stream_options"] = {"include_usage": True}
            for _ in range(4):
                prompt = router.client.post("/tokenize", json={"messages": messages}).json()
                reported = asyncio.run(stream(router.port, body))
                assert reported.is_done and not reported.errors
                messages += [
                    {"role": "assistant", "content": reported.text},
                    {"role": "user", "content": "and then?"},
                ]
                is_reported(router, body, prompt["count"])
        name = "octavo_router_prefix"
        assert router.metric(f"{name}_prediction_error_tokens_count") == 16
        errors = f"{name}_prediction_error_tokens_bucket"
        assert router.metric(errors, le=f"{CHUNK_TOKENS}.0") == 16
        hits = router.metric(f"{name}_predicted_tokens_total")
        actual = router.metric(f"{name}_cached_tokens_total")
        queried = router.metric(f"{name}_queried_tokens_total")
        assert 0 <= actual - hits <= 16 * CHUNK_TOKENS and hits > queried / 2
        assert router.metric("octavo_router_tokens_total", kind="output") == 16 * 6
        assert router.metric("octavo_router_tokens_total", kind="prompt") == queried


def test_an_engine_is_killed_under_fifty_streams_and_comes_back(platform: Platform):
    router, engine = platform.router, platform.engines[0]
    wanted = bodies(50)
    resumed = router.metric("octavo_router_resumes_total")

    reported = asyncio.run(streams(router.port, wanted, after=30, meanwhile=engine.process.kill))

    all_whole(reported, unbroken(platform.engines[1].url, wanted))
    assert router.metric("octavo_router_resumes_total") > resumed
    port = platform.ports[0]
    router.until(lambda: router.states()[port] != "ready")
    platform.start_again(0)

    def is_used() -> bool:
        more = bodies(12, max_tokens=4, start=random.randrange(10**6))
        requested = asyncio.run(streams(router.port, more, after=0, meanwhile=lambda: None))
        return any(one.served_by.endswith(str(port)) for one in requested)

    router.until(is_used)


def test_an_engine_that_must_go_loses_nothing(platform: Platform):
    """Its drain ends before its streams do; they go on elsewhere."""
    router = platform.router
    engine, other = platform.engines[2], platform.engines[1]
    platform.engines[2] = engine
    engine.signal(signal.SIGTERM)
    assert engine.wait() == 0
    platform.start_again(2, "--shutdown-timeout", "0.05")
    wanted = bodies(24, start=100)

    reported = asyncio.run(
        streams(router.port, wanted, after=20, meanwhile=platform.engines[2].process.terminate)
    )

    assert platform.engines[2].wait() == 0
    all_whole(reported, unbroken(other.url, wanted))
    platform.start_again(2)


def test_sigterm_of_the_router_ends_no_stream(platform: Platform):
    wanted = bodies(12, start=200)
    with platform.another_router() as router:
        reported = asyncio.run(
            streams(router.port, wanted, after=12, meanwhile=router.process.terminate)
        )
        assert router.wait() == 0
        assert len(router.access_lines) == 12
    all_whole(reported, unbroken(platform.engines[0].url, wanted))


def test_a_killed_router_leaves_no_work_behind(platform: Platform):
    """The engines' connections end with it, and with them what nobody will read."""
    wanted = bodies(12, max_tokens=1500, start=300)

    def running() -> list[float]:
        loads = []
        for engine in platform.engines:
            text = platform.router.client.get(f"{engine.url}/metrics").text
            [line] = [
                line for line in text.splitlines()
                if line.startswith("octavo_num_requests_running")
            ]  # fmt: skip
            loads.append(float(line.split()[-1]))
        return loads

    async def play(port: int, kill: Any) -> None:
        spoken = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(port, body, on_text=spoken.release)) for body in wanted]
        for _ in wanted:
            await spoken.acquire()
        kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    with platform.another_router() as router:
        asyncio.run(play(router.port, router.process.kill))
    platform.router.until(lambda: sum(running()) == 0, limit_s=5.0)
