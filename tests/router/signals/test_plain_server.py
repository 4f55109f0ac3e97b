"""Servers that push nothing: asked what they serve and how busy they are, believed with care."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.stream import Load
from octavo_router.endpoints.endpoint import UNKNOWN_LOAD
from octavo_router.signals.plain_load import PlainLoad
from tests.fakes.engine_stream import EngineStream
from tests.fakes.facts import run, until
from tests.fakes.listening import FAST, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.metrics.counts import LabelledCounter
    from tests.fakes.listening import Listening

VLLM = b"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a \\"} b"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
process_start_time_seconds 1.7e9
"""
MODELS = {
    "data": [
        {"id": "m", "max_model_len": 4096, "vocab_size": 512, "root": "m", "parent": None},
        {"id": "law", "parent": "m"},
    ]
}


def page(**values: str) -> bytes:
    return b"".join(b"vllm:%s %s\n" % (k.encode(), v.encode()) for k, v in values.items())


def models(*names: str) -> bytes:
    return json.dumps({"data": [{"id": name} for name in names]}).encode()


def test_a_page_of_vllm():
    reported = PlainLoad(VLLM)
    assert reported.load == Load(running=3, waiting=2, kv_usage=0.25)
    assert reported.started_at == 1.7e9


@pytest.mark.parametrize(
    "text",
    [
        b"octavo_num_requests_running 3\noctavo_num_requests_waiting 2\n"
        b"octavo_kv_cache_usage_perc 0.25\n",
        b'sglang:num_running_reqs{a="b"} 3\nsglang:num_queue_reqs 2\nsglang:token_usage 0.25\n',
        b"llamacpp:requests_processing 3\r\nllamacpp:requests_deferred 2\n"
        b"llamacpp:kv_cache_usage_ratio 0.25 1700000000000\n",
        b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"
        b"vllm:gpu_cache_usage_perc .25\n",
    ],
)
def test_pages_of_others(text):
    assert PlainLoad(text).load == Load(running=3, waiting=2, kv_usage=0.25)


def test_ranks_add_up_and_the_fullest_decides():
    text = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\nvllm:kv_cache_usage_perc{engine="%d"} 0.%d\n'
        % (rank, rank, rank, rank)
        for rank in (1, 2, 3)
    )
    assert PlainLoad(text).load == Load(running=6, kv_usage=0.3)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>busy</html>",
        page(kv_cache_usage_perc="0.5"),
        page(num_requests_running="NaN", num_requests_waiting="0"),
        page(num_requests_running="-1", num_requests_waiting="0"),
        page(num_requests_running="+Inf", num_requests_waiting="0"),
        page(num_requests_running="many", num_requests_waiting="0"),
        page(num_requests_running="1", kv_cache_usage_perc="25"),
        page(num_requests_running="1", kv_cache_usage_perc="NaN"),
    ],
)
def test_what_cannot_be_true_is_unknown_and_not_zero(text):
    assert PlainLoad(text).load is None


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_page(data):
    PlainLoad(VLLM + data)
    PlainLoad(data + VLLM)


def test_a_plain_server_is_found_out_and_polled():
    async def story() -> None:
        engine = EngineStream(status=404)
        engine.pages = {"/metrics": (200, VLLM), "/v1/models": (200, json.dumps(MODELS).encode())}
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            await until(lambda: endpoint.state == "ready" and endpoint.load_at is not None)
            assert endpoint.kind == "openai"
            assert endpoint.names == ("m", "law")
            assert endpoint.adapters == {"law"}
            assert (endpoint.max_model_len, endpoint.vocab_size) == (4096, 512)
            assert endpoint.load == Load(running=3, waiting=2, kv_usage=0.25)
            engine.pages["/v1/models"] = (200, models("other"))
            await until(lambda: endpoint.names == ("other",))

    run(story())


def test_a_server_without_metrics_or_that_wants_a_key_is_ready_all_the_same():
    async def story() -> None:
        engine = EngineStream(status=401)
        engine.pages = {"/v1/models": (401, b"")}
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec(names=("m",)))
            await until(lambda: endpoint.state == "ready")
            assert endpoint.names == ("m",)
            assert endpoint.load_at is None

    run(story())


def test_an_octavo_engine_that_refuses_the_key_is_not_taken_for_a_plain_one():
    async def story() -> None:
        async with EngineStream(status=401) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec(kind="octavo"))
            await until(lambda: "refuses the router's key" in endpoint.reason)
            assert endpoint.state == "connecting"

    run(story())


@asynccontextmanager
async def busy_vllm() -> AsyncIterator[tuple[EngineStream, Listening, Endpoint]]:
    """A plain server whose load is known."""
    engine = EngineStream()
    engine.pages = {"/metrics": (200, VLLM), "/v1/models": (200, models("m"))}
    async with engine, listening() as router:
        (endpoint,) = router.add(engine.spec(kind="openai"))
        await until(lambda: endpoint.load.running == 3)
        yield engine, router, endpoint


def test_metrics_that_fail_make_the_load_unknown_and_keep_the_server():
    async def story() -> None:
        async with busy_vllm() as (engine, _, endpoint):
            for bad in ((500, b""), (200, page(num_requests_running="NaN"))):
                engine.pages["/metrics"] = bad
                await until(lambda: endpoint.load_at is None)
                assert endpoint.load == UNKNOWN_LOAD
                assert endpoint.state == "ready"
                engine.pages["/metrics"] = (200, VLLM)
                await until(lambda: endpoint.load.running == 3)

    run(story())


def test_a_plain_server_that_dies_is_down_and_comes_back_as_what_it_is_then():
    async def story() -> None:
        engine = EngineStream(status=404)
        engine.pages = {"/v1/models": (200, models("m"))}
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            await until(lambda: endpoint.state == "ready")
            router.index.assume(endpoint.slot, bytes(range(8)), 16.0)
            await engine.stop()
            await until(lambda: endpoint.state == "down")
            assert router.index.num_keys(endpoint.slot) == 0
            engine.status = 200  # somebody put an Octavo engine there
            await engine.start()
            await until(lambda: endpoint.state == "ready")
            assert endpoint.kind == "octavo"

    run(story())


def test_a_new_process_has_an_empty_cache():
    async def story() -> None:
        async with busy_vllm() as (engine, router, endpoint):
            router.index.assume(endpoint.slot, bytes(range(8)), 16.0)
            engine.pages["/metrics"] = (200, VLLM.replace(b"1.7e9", b"1.8e9"))
            await until(lambda: router.index.num_keys(endpoint.slot) == 0)

    run(story())


def test_a_server_that_does_not_answer_is_down_after_a_few_polls():
    async def story() -> None:
        engine = EngineStream(status=404)
        engine.pages = {"/v1/models": (200, models("m"))}
        settings_ = replace(FAST, backoff_min_s=60.0, backoff_max_s=60.0)
        async with engine, listening(settings_, rng=random.Random(3)) as router:
            (endpoint,) = router.add(engine.spec())
            await until(lambda: endpoint.state == "ready")
            engine.pages["/v1/models"] = (500, b"")
            await until(lambda: endpoint.state == "down")
            assert endpoint.reason == "/v1/models answers 500"
            assert router.metrics.signals.polls["failed",] == 3

    run(story())


class Counting(random.Random):
    """Each pause asks for one number."""

    num_requests = 0

    def random(self) -> float:
        self.num_requests += 1
        return super().random()


def is_beyond(polls: LabelledCounter, count: int) -> bool:
    return polls["ok",] > count


def test_an_idle_server_is_asked_seldom_and_one_with_work_often():
    async def story() -> None:
        engine = EngineStream()
        idle = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        engine.pages = {"/metrics": (200, idle), "/v1/models": (200, models("m"))}
        settings_ = replace(FAST, poll_s=0.02, idle_polls=1000, models_s=1000.0)
        rng = Counting(7)
        async with engine, listening(settings_, rng=rng) as router:
            (endpoint,) = router.add(engine.spec(kind="openai"))
            polls = router.metrics.signals.polls
            await until(lambda: polls.get(("ok",), 0) == 1)
            for cause in ("a pick", "in flight"):  # the pauses of an idle one end with work
                before = polls["ok",]
                if cause == "a pick":
                    endpoint.last_pick += 1
                else:
                    endpoint.in_flight += 1
                await until(partial(is_beyond, polls, before))
            await until(lambda: polls["ok",] >= 6)  # often, as long as something is in flight
            endpoint.in_flight = 0
            engine.pages["/metrics"] = (200, VLLM)
            endpoint.last_pick += 1
            await until(lambda: endpoint.load.running == 3)
            seen = polls["ok",]
            await until(lambda: polls["ok",] >= seen + 3)  # others keep it busy
            engine.pages["/metrics"] = (200, idle)
            await until(lambda: endpoint.load.running == 0)
            seen, pauses = polls["ok",], rng.num_requests
            await until(lambda: rng.num_requests >= pauses + 10)
            assert polls["ok",] <= seen + 1

    run(story())


def test_an_idle_server_that_ends_its_connection_is_looked_at_soon():
    """It may have died; who ends each of its connections is no news."""

    async def story() -> None:
        engine = EngineStream()
        idle = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        engine.pages = {"/metrics": (200, idle), "/v1/models": (200, models("m"))}
        settings_ = replace(FAST, poll_s=0.01, idle_polls=10**6)
        async with engine, listening(settings_) as router:
            (endpoint,) = router.add(engine.spec(kind="openai"))
            await until(lambda: endpoint.state == "ready")
            await engine.stop()
            await until(lambda: endpoint.state == "down")

    run(story())
