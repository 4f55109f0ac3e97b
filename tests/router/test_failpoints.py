"""A process dies or waits at each failpoint in turn: every stream is whole, and nothing is left.

Red when: a token is lost or doubled at a boundary, a request never ends, a block or a slot is kept,
or a router goes on sending requests where nobody is.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo_common import failpoints
from octavo_common.failpoints import POINTS, VARIABLE
from tests.fakes.process import PATIENCE_S, ServeProcess, serving
from tests.fakes.router_process import RouterProcess, routing, stream
from tests.router.conftest import ENGINE_FLAGS, port_of
from tests.router.test_with_engines import all_whole, bodies, unbroken

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

BODIES = bodies(8, max_tokens=24, start=500)
TEXT = "server.text"  # no short request passes there: tests/router/test_hanging_text.py
ENGINES = [name for name in POINTS if not name.startswith("router.") and name != TEXT]
ROUTERS = [name for name in POINTS if name.startswith("router.")]


@pytest.fixture(scope="module")
def healthy() -> Iterator[ServeProcess]:
    with serving(*ENGINE_FLAGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(healthy: ServeProcess) -> list[str]:
    return unbroken(healthy.url, BODIES)


def engine_metric(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics", timeout=PATIENCE_S).text
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def until_idle(*urls: str) -> None:
    """No request runs or waits, and no block is held by one."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    ends_at = time.monotonic() + PATIENCE_S
    while left := {(url, name) for url in urls for name in names if engine_metric(url, name)}:
        assert time.monotonic() < ends_at, left
        time.sleep(0.05)


async def all_streams(port: int) -> list[Any]:
    requested = (stream(port, body) for body in BODIES)
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*requested, return_exceptions=True)


def in_flight(router: RouterProcess) -> float:
    state = router.get("/octavo/v1/state")
    return float(sum(one["in_flight"] for one in state["endpoints"]))


def residency(router: RouterProcess) -> dict[str, int]:
    """How many keys it has of each engine."""
    return {row["endpoint"]: row["keys"] for row in router.get("/debug/index")["endpoints"]}


def until_as_a_new_one_knows(router: RouterProcess, urls: str) -> None:
    """Nothing stale is left in its index: a router that has just started has the same."""
    with routing("--upstreams", urls, "--debug-endpoints") as fresh:
        router.until(lambda: residency(router) == residency(fresh) != {})


@pytest.mark.parametrize("action", ["kill@1", "kill@4", "delay:0.6@2"])
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_dies_or_waits_at_each_point(
    name: str, action: str, healthy: ServeProcess, texts: list[str]
) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(serving(*ENGINE_FLAGS, env={VARIABLE: f"{name}={action}"}))
        urls = f"{other.url},{healthy.url}"
        router = stack.enter_context(routing("--upstreams", urls, "--debug-endpoints"))
        router.until(lambda: list(router.states().values()) == ["ready"] * 2)
        all_whole(asyncio.run(all_streams(router.port)), texts)
        router.until(lambda: in_flight(router) == 0)
        if action.startswith("kill"):
            # The point was reached: its engine is gone, and nothing is sent there any more.
            router.until(lambda: router.states().get(port_of(other)) != "ready")
            until_idle(healthy.url)
        else:
            until_idle(healthy.url, other.url)
        all_whole(asyncio.run(all_streams(router.port)), texts)
        until_idle(healthy.url)
        until_as_a_new_one_knows(router, urls)


@pytest.mark.parametrize("action", ["kill@1", "kill@3", "delay:0.6@2"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_dies_or_waits_at_each_point(
    name: str, action: str, healthy: ServeProcess, texts: list[str]
) -> None:
    env = {VARIABLE: f"{name}={action}"}
    with routing("--upstreams", healthy.url, env=env) as router:
        router.until(lambda: list(router.states().values()) == ["ready"])
        answers = asyncio.run(all_streams(router.port))
        if action.startswith("kill"):
            assert any(isinstance(one, Exception) for one in answers)
            assert router.wait() == -9
        else:
            all_whole(answers, texts)
            router.until(lambda: in_flight(router) == 0)
    until_idle(healthy.url)
    with routing("--upstreams", healthy.url) as another:
        all_whole(asyncio.run(all_streams(another.port)), texts)
    until_idle(healthy.url)


def test_settings_that_name_no_point_are_refused() -> None:
    known = failpoints.parse("core.sent=kill@2; router.body=delay:0.5@1")
    assert known["core.sent"] == ("kill", 0.0, 2)
    assert known["router.body"] == ("delay", 0.5, 1)
    assert failpoints.parse("") == {}
    for wrong in ("core.nothing=kill", "core.sent=explode", "core.sent=kill@x"):
        with pytest.raises(ValueError, match=VARIABLE):
            failpoints.parse(wrong)


def test_they_are_off_without_the_setting() -> None:
    assert not failpoints.IS_ON
    for name in POINTS:
        failpoints.hit(name)
