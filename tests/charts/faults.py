"""One fault for each alert, on real processes: begun, and ended, as in the field.

Each is a context: within it the fault lasts. `FAULTS` says which alerts it must make fire, and with
which labels, so that no other fault's alert is taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import signal
import time
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, ROUTER_COMPONENT
from tests.charts.broken_model import DAMAGED
from tests.charts.live_stack import post
from tests.fakes.fault_proxy import Answer, ApiCall
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from tests.charts.live_stack import LiveStack


@dataclass(frozen=True)
class Fault:
    """Labels by alert: what of `ALERTS` must be found, as a selector."""

    alerts: Mapping[str, str]
    lasts: Callable[[LiveStack], AbstractAsyncContextManager[None]]


# --- load -----------------------------------------------------------------------------------------


@asynccontextmanager
async def load(clients: int, ask: Callable[[int], Awaitable[object]]) -> AsyncIterator[None]:
    """So many clients, each of which asks again as soon as it was answered. `ask` gets a number
    that no other call gets."""
    numbers = itertools.count()

    async def client() -> None:
        while True:
            await ask(next(numbers))
            await asyncio.sleep(0.02)  # an answer may come at once: this is load, not a flood

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- engines --------------------------------------------------------------------------------------


@asynccontextmanager
async def damaged_weights(stack: LiveStack) -> AsyncIterator[None]:
    """Every request touches the row of the weights that is no numbers."""
    async with load(2, lambda _: stack.ask("broken", prompt=[3, 4, DAMAGED])):
        yield


@asynccontextmanager
async def hanging_engines(stack: LiveStack) -> AsyncIterator[None]:
    """Of two, one's process stands still, and in the other one the core does, again and again: it
    is killed by its supervisor meanwhile, and made anew. No two requests are alike: two deaths
    would have the same one refused."""
    process, core = stack.engines["process"].process, stack.engines["core"].process

    def prompt(number: int) -> list[int]:
        return [3 + number % 50, 3 + number // 50 % 50, 3 + number // 2500]

    async def stop_core() -> None:
        while True:
            for child in psutil.Process(core.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.suspend()
            await asyncio.sleep(0.2)

    stopping = asyncio.create_task(stop_core())
    process.send_signal(signal.SIGSTOP)
    try:
        async with load(8, lambda n: stack.ask("frail", prompt=prompt(n))):
            yield
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        process.send_signal(signal.SIGCONT)
        for child in psutil.Process(core.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()


@asynccontextmanager
async def requests_that_do_not_reach_an_engine(stack: LiveStack) -> AsyncIterator[None]:
    """Of two; its signals arrive, so that it counts as ready. Test generations fail like all else,
    and it stays ejected until the end."""
    stack.cutter.cut()
    try:
        async with load(2, lambda n: stack.ask("cut", f"Number {n}")):
            yield
    finally:
        stack.cutter.mend()


@asynccontextmanager
async def a_request_that_kills_engines(stack: LiveStack) -> AsyncIterator[None]:
    """Whichever engine has it in hand is killed: its core stands still but for a moment each
    second, so that the request hardly ends before that, and no core seems to hang. The client
    sends it again, as client libraries do."""
    engines = {name: stack.engines[name] for name in ("mortal-1", "mortal-2")}

    def cores(name: str) -> list[psutil.Process]:
        return list(psutil.Process(engines[name].process.pid).children())

    def busy() -> list[str]:
        endpoints = stack.router.get("/octavo/v1/state")["endpoints"]
        urls = {one["url"] for one in endpoints if one["in_flight"]}
        return [name for name, engine in engines.items() if engine.url in urls]

    async def kill_whoever_computes_it() -> None:
        alive, runs_at = set(engines), time.monotonic() + 1.0
        while alive:
            for name in alive.intersection(await asyncio.to_thread(busy)):
                for core in cores(name):
                    core.kill()
                alive.remove(name)
            if time.monotonic() >= runs_at:
                still = [core for name in alive for core in cores(name)]
                for core in still:
                    core.resume()
                await asyncio.sleep(0.02)
                for core in still:
                    core.suspend()
                runs_at = time.monotonic() + 1.0
            await asyncio.sleep(0.05)

    if await stack.ask("mortal", prompt=[3, 4]) != 200:
        raise AssertionError("the pool that is to be killed does not serve")
    await asyncio.sleep(3 * stack.speed.scrape_s)  # its counters were seen, and are zero
    for name in engines:
        for core in cores(name):
            core.suspend()
    killing = asyncio.create_task(kill_whoever_computes_it())
    try:
        async with load(1, lambda _: stack.ask("mortal", prompt=[3, 4, 5])):
            yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


@asynccontextmanager
async def more_than_one_engine_serves(stack: LiveStack) -> AsyncIterator[None]:
    """Everybody waits in the router, for longer than anybody likes."""
    async with load(56, lambda n: stack.ask("slow", f"Number {n}", max_tokens=40)):
        yield


@asynccontextmanager
async def more_than_all_engines_take(stack: LiveStack) -> AsyncIterator[None]:
    """One engine refuses for want of memory, and so does the next one that is tried."""

    async def ask(number: int) -> None:
        await stack.ask("full", f"Number {number}", max_tokens=90)
        await asyncio.sleep(0.1)

    async with load(12, ask):
        yield


@asynccontextmanager
async def more_sequences_than_memory(stack: LiveStack) -> AsyncIterator[None]:
    """Again and again all goes well for so long that the scheduler lets in whoever comes, and then
    many come at once."""
    port = int(stack.engines["crowded"].url.rpartition(":")[2])

    async def ask(text: str, max_tokens: int) -> None:
        await post(port, {"model": "crowded", "prompt": text, "max_tokens": max_tokens})

    async def calm_and_crowd(turn: int) -> None:
        await ask("Alone", 620)
        await asyncio.gather(*(ask(f"Number {turn} {n}", 500) for n in range(160)))

    async with load(1, calm_and_crowd):
        yield


@asynccontextmanager
async def no_engine(stack: LiveStack) -> AsyncIterator[None]:
    async with load(1, lambda _: stack.ask("none")):
        yield


@asynccontextmanager
async def prompts_that_begin_with_the_time(stack: LiveStack) -> AsyncIterator[None]:
    """Until now all clients asked the same, which engines keep. See `steady_load`."""
    stack.is_steady = False
    try:
        yield
    finally:
        stack.is_steady = True


def steady_load(stack: LiveStack) -> AbstractAsyncContextManager[None]:
    """Goes on all the time: what is all right, until the fault above comes."""
    common = "You are a helpful assistant. " * 40

    async def ask(number: int) -> None:
        own = hashlib.sha256(str(number).encode()).hexdigest()
        await stack.ask("steady", common if stack.is_steady else f"{own}: what is the time?")
        await asyncio.sleep(0.05 if stack.is_steady else 0.15)

    return load(2, ask)


# --- routers --------------------------------------------------------------------------------------


@asynccontextmanager
async def a_list_of_engines_that_is_wrong(stack: LiveStack) -> AsyncIterator[None]:
    good = stack.spare_upstreams.read_text()
    stack.spare_upstreams.write_text("upstreams: 7\n")
    try:
        yield
    finally:
        stack.spare_upstreams.write_text(good)


@asynccontextmanager
async def a_configuration_that_is_wrong(stack: LiveStack) -> AsyncIterator[None]:
    good = stack.spare_config.read_text()
    stack.spare_config.write_text("routing: {policy: prefix-laod}\n")

    async def reload(_: int) -> None:
        stack.spare.signal(signal.SIGHUP)
        await asyncio.sleep(0.5)

    async with load(1, reload):
        yield
    stack.spare_config.write_text(good)


@asynccontextmanager
async def a_clock_that_is_set(stack: LiveStack) -> AsyncIterator[None]:
    """That of a router, which `settable_clock` has made its own."""
    await asyncio.sleep(3 * stack.speed.scrape_s)  # its counter was seen, and is zero

    async def set_clock(number: int) -> None:
        stack.clock.write_text(str(100 * (number + 1)))
        await asyncio.sleep(2.5)  # it is looked at once a second

    async with load(1, set_clock):
        yield


@asynccontextmanager
async def a_throttled_router(stack: LiveStack) -> AsyncIterator[None]:
    """As by a CPU limit: it may compute a part of each period only."""
    process = stack.spare.process

    async def throttle(_: int) -> None:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.18)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.12)

    async with load(1, throttle):
        yield
    process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def routers_that_hang(stack: LiveStack) -> AsyncIterator[None]:
    processes = [stack.router.process, stack.spare.process]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


# --- the operator ---------------------------------------------------------------------------------


@asynccontextmanager
async def refused_writes(stack: LiveStack) -> AsyncIterator[None]:
    """The operator's Role was replaced by a smaller one, and people go on editing."""

    def on_call(call: ApiCall) -> Answer | None:
        is_of_lease = "/leases" in call.path
        return Answer(403, "not yours") if call.is_write and not is_of_lease else None

    stack.proxy.on_call = on_call

    async def create(number: int) -> None:
        body = make_deployment(f"refused-{number}", stack.namespace)
        await asyncio.to_thread(stack.server.create, body)
        await asyncio.sleep(0.3)

    async with load(1, create):
        yield
    stack.proxy.on_call = lambda call: None


@asynccontextmanager
async def an_api_server_that_is_away(stack: LiveStack) -> AsyncIterator[None]:
    """No call gets through, and the watches tell nothing more."""
    stack.proxy.on_call = lambda call: Answer(503)
    stack.proxy.is_frozen = True
    try:
        yield
    finally:
        stack.proxy.on_call = lambda call: None
        stack.proxy.is_frozen = False
        stack.proxy.cut_watches()


@asynccontextmanager
async def a_router_that_nobody_reaches(stack: LiveStack) -> AsyncIterator[None]:
    """Its pod is Ready; its address leads nowhere."""
    meta = {"namespace": "octavo-system", "name": "lost",
            "labels": {COMPONENT_LABEL: ROUTER_COMPONENT}}  # fmt: skip
    spec = {
        "containers": [{
            "name": "router", "image": "i",
            "securityContext": {"allowPrivilegeEscalation": False, "runAsNonRoot": True,
                                "capabilities": {"drop": ["ALL"]},
                                "seccompProfile": {"type": "RuntimeDefault"}},
        }]
    }  # fmt: skip
    wanted = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    pod = await asyncio.to_thread(stack.server.create, wanted)
    ready = [{"type": "Ready", "status": "True"}]
    status = {"podIP": "127.9.9.9", "podIPs": [{"ip": "127.9.9.9"}], "conditions": ready}
    await asyncio.to_thread(stack.server.patch, pod, {"status": status}, subresource="status")
    try:
        yield
    finally:
        path = "/api/v1/namespaces/octavo-system/pods/lost"
        await asyncio.to_thread(stack.server.request, "DELETE", path, gracePeriodSeconds="0")


@asynccontextmanager
async def a_mistake_of_ours(stack: LiveStack) -> AsyncIterator[None]:
    """Nobody knows the next one; this one divides by zero for one LLMDeployment."""
    reconciler = stack.operator._reconciler
    assert reconciler is not None
    real = reconciler.reconcile

    async def reconcile(key: Any) -> Any:
        return 1 // 0 if key.name == "mistaken" else await real(key)

    reconciler.reconcile = reconcile  # type: ignore[method-assign]  # the mistake
    body = make_deployment("mistaken", stack.namespace)
    await asyncio.to_thread(stack.server.create, body)
    try:
        yield
    finally:
        reconciler.reconcile = real  # type: ignore[method-assign]  # as it was


BESIDE_EACH_OTHER = (
    Fault({"OctavoEngineCorrupt": 'pod="broken"',
           "OctavoErrorBudgetBurnsFast": 'model="broken"',
           "OctavoErrorBudgetBurnsSlowly": 'model="broken"'}, damaged_weights),
    Fault({"OctavoEngineStalled": 'pod="core"',
           "OctavoSignalsStale": 'pool="frail"'}, hanging_engines),
    Fault({"OctavoEnginesEjected": 'pool="cut"'}, requests_that_do_not_reach_an_engine),
    Fault({"OctavoRequestKillsEngines": 'pool="mortal"'}, a_request_that_kills_engines),
    Fault({"OctavoRequestsLost": 'pool="full"'}, more_than_all_engines_take),
    Fault({"OctavoQueueSlow": 'pool="slow"',
           "OctavoTTFTBudgetBurnsFast": 'pool="slow"',
           "OctavoTTFTBudgetBurnsSlowly": 'pool="slow"'}, more_than_one_engine_serves),
    Fault({"OctavoKVCacheFull": 'pod="crowded"'}, more_sequences_than_memory),
    Fault({"OctavoNoEngines": 'pool="none"'}, no_engine),
    Fault({"OctavoHitRateCollapsed": 'pool="steady"'}, prompts_that_begin_with_the_time),
)  # fmt: skip
# One after the other: they are faults of the same process.
OF_A_ROUTER = (
    Fault({"OctavoRouterConfigRefused": 'pod="spare"'}, a_configuration_that_is_wrong),
    Fault({"OctavoDiscoveryFailing": 'source="file"'}, a_list_of_engines_that_is_wrong),
    Fault({"OctavoClockSet": 'pod="spare"'}, a_clock_that_is_set),
    Fault({"OctavoRouterLoopSlow": 'pod="spare"'}, a_throttled_router),
)
OF_THE_OPERATOR = (
    Fault({"OctavoOperatorBug": ""}, a_mistake_of_ours),
    Fault({"OctavoReconcileFailing": ""}, refused_writes),
    Fault({"OctavoRoutersUnheard": 'reason="unreachable"'}, a_router_that_nobody_reaches),
    Fault({"OctavoOperatorWithoutLeader": "", "OctavoOperatorWatchStale": ""},
          an_api_server_that_is_away),
)  # fmt: skip
LAST = (Fault({"OctavoRoutersAbsent": ""}, routers_that_hang),)
EVERY = (*BESIDE_EACH_OTHER, *OF_A_ROUTER, *OF_THE_OPERATOR, *LAST)
