"""Whatever happens between operator and API server, an LLMDeployment's life ends the same.

All lives run side by side, each in its namespace and with an operator of its own behind a proxy
that misbehaves in one way; a test looks at the end of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster.kube_config import load
from tests.fakes.deployments import CPU_IMAGE
from tests.fakes.effort import sample
from tests.fakes.fault_proxy import (
    Answer,
    ApiCall,
    CutAfter,
    CutBefore,
    Event,
    Fault,
    FaultProxy,
    Lines,
    Wait,
    gone,
)
from tests.fakes.live_operator import operator
from tests.fakes.operator_story import live_through, snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster
SEED = 20_261_121
RESYNC_S = 1.0  # what a watch lost is found by then
QUIET_S = 1.5  # more than a resync: nothing is written in it


@dataclass
class End:
    """How a life ended."""

    objects: Mapping[str, Any]
    writes_when_idle: int = 0
    bugs: int = 0
    num_faults: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


# --- ways to misbehave ----------------------------------------------------------------------------


def lost_repeated_and_late_events(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """Late by up to a second, so that old ones come after newer ones."""

    def on_event(event: Event) -> Lines:
        end.num_faults += 1
        return rng.choice(
            (
                [],
                [(0.0, event), (0.0, event), (rng.random(), event)],
                [(rng.random(), event)],
                [(0.0, event)],
            )
        )

    proxy.on_event = on_event


def frozen_streams(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """They stay open and tell nothing, for ever."""
    proxy.is_frozen = True
    end.num_faults += 1


def broken_streams(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """Reset, or gone: as an answer, and within an answer of 200."""

    def on_event(event: Event) -> Lines:
        if rng.random() < 0.8:
            return [(0.0, event)]
        end.num_faults += 1
        if rng.random() < 0.5:
            proxy.cut_watches()
        return [(0.0, gone())]

    def on_call(call: ApiCall) -> Fault:
        if call.is_watch and rng.random() < 0.1:
            end.num_faults += 1
            return Answer(410, "too old resource version")
        return None

    proxy.on_event, proxy.on_call = on_event, on_call


def failing_calls(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """Answers of an overloaded server, conflicts, and writes of which nobody is told."""

    def on_call(call: ApiCall) -> Fault:
        if rng.random() >= 0.08 or end.num_faults >= 40:
            return None
        end.num_faults += 1
        faults: list[Fault] = [Answer(429, "slow down", wait) for wait in ("0", "1", "garbage")]
        faults += [Answer(status) for status in (500, 503, 504)]
        faults += [CutAfter(), CutBefore(), Answer(409, "modified")]
        return rng.choice(faults)

    proxy.on_call = on_call


def an_outage(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """For three seconds from the fifth write on nothing goes."""
    began_at: list[float] = []

    def on_call(call: ApiCall) -> Fault:
        if call.is_write and sum(c.is_write for c in proxy.calls) == 5:
            began_at.append(time.monotonic())
        if not began_at or time.monotonic() - began_at[0] > 3.0:
            return None
        end.num_faults += 1
        return Answer(503)

    proxy.on_call = on_call


def forbidden_for_a_while(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    """As when a Role was replaced: the first writes of engines are refused."""

    def on_call(call: ApiCall) -> Fault:
        if call.is_write and call.path.startswith("/apis/apps") and end.num_faults < 3:
            end.num_faults += 1
            return Answer(403, 'User "x" cannot patch resource "deployments"')
        return None

    proxy.on_call = on_call


def slow_server(proxy: FaultProxy, rng: random.Random, end: End) -> None:
    def on_call(call: ApiCall) -> Fault:
        end.num_faults += 1
        return None if call.is_watch else Wait(0.3 * rng.random())

    proxy.on_call = on_call


Way = Callable[[FaultProxy, random.Random, End], None]
ALONE: tuple[Way, ...] = (
    lost_repeated_and_late_events, frozen_streams, broken_streams, failing_calls, an_outage,
    forbidden_for_a_while, slow_server,
)  # fmt: skip
TOGETHER: tuple[tuple[Way, ...], ...] = (
    (lost_repeated_and_late_events, an_outage, slow_server),
    (broken_streams, forbidden_for_a_while),
    (frozen_streams, failing_calls),
)
# Each alone says which way it was; together they cost less than half.
LIVES = {
    " and ".join(way.__name__ for way in ways): ways
    for ways in sample(tuple((way,) for way in ALONE), TOGETHER)
}


def misbehave(proxy: FaultProxy, ways: Sequence[Way]) -> list[End]:
    """In all these ways; of two faults for one call the first way's. Their counts."""
    on_calls, on_event, reported = [], proxy.on_event, []
    for way in ways:
        reported.append(End({}))
        proxy.on_call = lambda call: None
        way(proxy, random.Random(f"{SEED} {way.__name__}"), reported[-1])
        on_calls.append(proxy.on_call)

    def on_call(call: ApiCall) -> Fault:
        return next((fault for each in on_calls if (fault := each(call)) is not None), None)

    proxy.on_call = on_call
    assert sum(way in _OF_EVENTS for way in ways) <= 1
    assert (proxy.on_event is on_event) == (not set(ways) & _OF_EVENTS)
    return reported


_OF_EVENTS = {lost_repeated_and_late_events, broken_streams}


# --- lives ----------------------------------------------------------------------------------------


async def undisturbed(server: ApiServer, namespace: str) -> End:
    async with operator(server, namespace, lease=None, resync_s=RESYNC_S) as found:
        await live_through(server, namespace)
        return await _end(server, namespace, found)


async def disturbed(server: ApiServer, namespace: str, ways: Sequence[Way]) -> End:
    async with (
        FaultProxy(server) as proxy,
        operator(server, namespace, config=proxy.config, lease=None, resync_s=RESYNC_S) as found,
    ):
        reported = misbehave(proxy, ways)
        await live_through(server, namespace)
        proxy.on_call = lambda call: None  # what it wrote in the end is what it found to be missing
        end = await _end(server, namespace, found)
        end.num_faults = min(each.num_faults for each in reported)
        return end


async def two_at_once(server: ApiServer, namespace: str) -> End:
    """Neither knows of the other, and no Lease keeps them apart."""
    async with (
        operator(server, namespace, lease=None, resync_s=RESYNC_S, identity="one") as found,
        operator(server, namespace, lease=None, resync_s=RESYNC_S, identity="two"),
    ):
        await live_through(server, namespace)
        return await _end(server, namespace, found)


async def killed_again_and_again(server: ApiServer, namespace: str) -> End:
    """SIGKILL at moments that nobody chose; in the end one is let live."""
    rng = random.Random(SEED)
    end = End({})
    life = asyncio.create_task(live_through(server, namespace, within_s=90.0))
    for _ in sample(range(3), range(1)):
        async with _process(server, namespace) as process:
            await _first_write(server, namespace, process)
            await asyncio.wait([life], timeout=0.5 + 1.5 * rng.random())
            process.kill()
            end.num_faults += 1
    async with _process(server, namespace):
        await life
    end.objects = await asyncio.to_thread(snapshot, server, namespace)
    return end


@contextlib.asynccontextmanager
async def _process(server: ApiServer, namespace: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.cli", "operator", f"--kubeconfig={server.kubeconfig}",
        f"--namespaces={namespace}", "--leader-election=false", "--host=127.0.0.1", "--port=0",
        "--log-level=error", "--resync=10", f"--cpu-image={CPU_IMAGE}",
        env={k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")},
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _first_write(
    server: ApiServer, namespace: str, process: asyncio.subprocess.Process
) -> None:
    """So that it is killed at work, and not while Python starts: once per process."""
    before = len(await asyncio.to_thread(server.list, "v1", "Event", namespace))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(4.0):
            while process.returncode is None:
                if len(await asyncio.to_thread(server.list, "v1", "Event", namespace)) > before:
                    return
                await asyncio.sleep(0.05)


async def _end(server: ApiServer, namespace: str, found: Any) -> End:
    """When it has been quiet for a while, or never is. A back-off may still be on its way."""
    for _ in range(8):
        before = _writes(found)
        await asyncio.sleep(QUIET_S)
        if _writes(found) == before:
            break
    objects = await asyncio.to_thread(snapshot, server, namespace)
    return End(objects, _writes(found) - before, found.metrics.bugs)


def _writes(found: Any) -> int:
    return sum(n for (verb, _), n in found.metrics.calls.items() if verb not in ("get", "list"))


# --- ends -----------------------------------------------------------------------------------------


def live_all(apiserver: ApiServer) -> Mapping[str, End]:
    """All lives, by name."""

    async def live() -> dict[str, End]:
        new = apiserver.make_namespace
        lives = {
            "undisturbed": undisturbed(apiserver, new()),
            "two_at_once": two_at_once(apiserver, new()),
            "killed_again_and_again": killed_again_and_again(apiserver, new()),
            **{name: disturbed(apiserver, new(), ways) for name, ways in LIVES.items()},
        }
        results = await asyncio.gather(*lives.values(), return_exceptions=True)
        ends = {}
        for name, result in zip(lives, results, strict=True):
            if isinstance(result, BaseException):
                result.add_note(f"in the life called {name}")
                raise result
            ends[name] = result
        return ends

    assert load({}, str(apiserver.kubeconfig)).server == apiserver.url
    return asyncio.run(live())


@pytest.mark.timeout(180)
def test_every_life_ends_as_the_undisturbed_one(apiserver, subtests):
    """One test, so that one process lives them all."""
    ends = live_all(apiserver)
    undisturbed = ends["undisturbed"]
    for name, end in ends.items():
        with subtests.test(name):
            assert end.objects == undisturbed.objects
            assert end.bugs == 0
            assert end.writes_when_idle == 0  # nothing changes
            assert end.num_faults > 0 or name in ("undisturbed", "two_at_once")
