"""Processes to break: engines, routers, an operator, and a Prometheus that has the chart's rules.

Each pool is for one sort of fault, so that faults run side by side and no alert has two causes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from octavo_operator.cluster.leader import LeaseTimes
from octavo_operator.health import HealthServer
from octavo_operator.watch.work_queue import Pace
from tests.charts.broken_model import write_broken_model
from tests.charts.hurry import hurried
from tests.charts.prometheus import booted
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.live_operator import operator
from tests.fakes.process import ServeProcess, serving
from tests.fakes.request_cutter import RequestCutter
from tests.fakes.router_process import RouterProcess, routing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from octavo_operator.process import Operator
    from tests.charts.prometheus import Prometheus
    from tests.fakes.apiserver import ApiServer


@dataclass(frozen=True)
class Speed:
    """How much sooner alerts fire here, and what Prometheus must do for it."""

    windows: int  # five minutes of a rule are so many times shorter
    ages: int  # so is an age that a rule compares with
    scrape_s: float  # scraped and evaluated so often, and a scrape must answer within it
    limit_s: float  # for one alert to fire, or to clear


# By the seconds that the processes took to start: a machine that has other things to do answers
# scrapes too late for the fastest one, and then rates have nothing to compare.
SPEEDS = (
    (20.0, Speed(windows=200, ages=20, scrape_s=0.3, limit_s=90.0)),
    (45.0, Speed(windows=100, ages=20, scrape_s=0.6, limit_s=180.0)),
    (float("inf"), Speed(windows=50, ages=10, scrape_s=1.2, limit_s=360.0)),
)
SIM = ("--shutdown-timeout", "0.1", "--sim-step-base-ms")
NATIVE = ("--device", "cpu", "--num-threads", "1")  # its core is a process of its own
MODEL = "MODEL"  # stands for the folder of the damaged model
ENGINES = {
    # caches what is asked again
    "steady": ("steady", *SIM, "3"),
    # computes what is no number, where a prompt has a certain token
    "broken": (MODEL, *NATIVE, "--served-model-name", "broken"),
    # two that hang, each in another way
    "core": (MODEL, *NATIVE, "--served-model-name", "frail"),
    "process": (MODEL, *NATIVE, "--served-model-name", "frail"),
    # two that die of the same request
    "mortal-1": (MODEL, *NATIVE, "--served-model-name", "mortal"),
    "mortal-2": (MODEL, *NATIVE, "--served-model-name", "mortal"),
    # reached in two ways, one of which can be cut
    "cut": ("cut", *SIM, "3"),
    # serves four at once, each for a second
    "slow": ("slow", *SIM, "25", "--max-num-seqs", "4"),
    # have memory for two sequences each, and let one wait
    "full-1": ("full", *SIM, "20", "--sim-kv-blocks", "16", "--max-queue", "1"),
    "full-2": ("full", *SIM, "20", "--sim-kv-blocks", "16", "--max-queue", "1"),
    # has memory for a part of the sequences that it lets in
    "crowded": ("crowded", *SIM, "10", "--sim-kv-blocks", "768", "--max-num-seqs", "256"),
}


@dataclass
class LiveStack:
    """Everything runs. What a fault needs to touch is a field."""

    engines: dict[str, ServeProcess]
    router: RouterProcess
    spare: RouterProcess  # nobody sends it requests: for what is wrong with routers themselves
    spare_config: Path
    spare_upstreams: Path
    clock: Path  # by how many seconds the spare router's wall clock is ahead
    server: ApiServer
    namespace: str
    cutter: RequestCutter  # between the router and an engine
    proxy: FaultProxy  # between the operator and its API server
    operator: Operator
    prometheus: Prometheus
    speed: Speed
    is_steady: bool = True  # clients ask what is cached

    async def ask(self, model: str, text: str = "Hi", **more: Any) -> int:
        """A streamed answer, read to its end; its status. 0: the connection broke."""
        body = {"model": model, "prompt": text, "max_tokens": 4, "stream": True, **more}
        return await post(self.router.port, body)


@contextlib.asynccontextmanager
async def live_stack(
    program: str, folder: Path, server: ApiServer, rules: dict[str, Any]
) -> AsyncIterator[LiveStack]:
    """`rules` are those of the chart; they are hurried as the machine allows."""
    began_at = time.monotonic()
    async with AsyncExitStack() as stack:
        engines = await _start_engines(stack, folder)
        config = folder / "router.yaml"
        cutter = RequestCutter(int(engines["cut"].url.rpartition(":")[2]))
        await stack.enter_async_context(cutter)
        config.write_text(yaml.safe_dump(_router_config(engines, cutter)))
        upstreams, spare_config = folder / "upstreams.yaml", folder / "spare.yaml"
        upstreams.write_text(_upstreams(engines))
        spare_config.write_text(yaml.safe_dump({"discovery": {"file": str(upstreams)}}))
        starting = routing("--config", str(config))  # its probes come through the cutter
        router = await asyncio.to_thread(stack.enter_context, starting)
        clock = folder / "clock"
        env = settable_clock(folder / "path", clock)
        spare = stack.enter_context(routing("--config", str(spare_config), env=env))
        proxy = await stack.enter_async_context(FaultProxy(server))
        namespace = server.make_namespace()
        found = await stack.enter_async_context(
            operator(
                server, namespace, config=proxy.config, resync_s=1.0, poll_routers_s=0.25,
                lease=LeaseTimes(4.0, 0.5, 1.0), pace=Pace(first_retry_s=0.1, resync_s=1.0),
            )
        )  # fmt: skip
        health = await stack.enter_async_context(
            await HealthServer(found._health, found.metrics).start("127.0.0.1", 0)
        )
        targets = {
            **{name: engine.url for name, engine in engines.items()},
            "router": router.url,
            "spare": spare.url,
            "operator": f"http://127.0.0.1:{health.sockets[0].getsockname()[1]}",
        }
        took_s = time.monotonic() - began_at
        speed = next(speed for at_most_s, speed in SPEEDS if took_s <= at_most_s)
        every = f"{round(speed.scrape_s * 1000)}ms"
        own = hurried(rules, windows=speed.windows, ages=speed.ages, every=every)
        started = booted(program, folder, targets, scrape_s=speed.scrape_s, rules=own)
        prometheus = await asyncio.to_thread(stack.enter_context, started)
        yield LiveStack(
            engines, router, spare, spare_config, upstreams, clock, server, namespace, cutter,
            proxy, found, prometheus, speed,
        )  # fmt: skip


def settable_clock(folder: Path, clock: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is ahead by the seconds in the file `clock`:
    nobody may set the machine's."""
    clock.write_text("0")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        f"real, clock = time.time, pathlib.Path({str(clock)!r})\n"
        "time.time = lambda: real() + float(clock.read_text() or 0)\n"
    )
    return {"PYTHONPATH": str(folder)}


async def post(port: int, body: dict[str, Any]) -> int:
    """See `ask`. By hand: load must cost less than what it loads."""
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    status = b""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + text)
            status = await reader.readline()
            while await reader.read(2**16):
                pass
        finally:
            writer.close()
    return int(status.split()[1]) if status else 0


async def _start_engines(stack: AsyncExitStack, folder: Path) -> dict[str, ServeProcess]:
    model = str(write_broken_model(folder / "broken"))

    def start(first: str, *more: str) -> ServeProcess:
        found = stack.enter_context(serving(model if first == MODEL else first, *more))
        threading.Thread(target=_read_on, args=(found,), daemon=True).start()
        return found

    starting = [asyncio.to_thread(start, *flags) for flags in ENGINES.values()]
    return dict(zip(ENGINES, await asyncio.gather(*starting), strict=True))


def _read_on(engine: ServeProcess) -> None:
    """A log that nobody reads stops its writer."""
    assert engine.process.stderr is not None
    for _ in engine.process.stderr:
        pass


def _router_config(engines: dict[str, ServeProcess], cutter: RequestCutter) -> dict[str, Any]:
    urls = [
        ("steady", engines["steady"].url), ("frail", engines["core"].url),
        ("frail", engines["process"].url), ("mortal", engines["mortal-1"].url),
        ("mortal", engines["mortal-2"].url), ("slow", engines["slow"].url),
        ("full", engines["full-1"].url), ("full", engines["full-2"].url),
        ("cut", engines["cut"].url), ("cut", cutter.url), ("broken", engines["broken"].url),
        ("broken", engines["broken"].url.replace("127.0.0.1", "localhost")),
        ("none", "http://127.0.0.1:9"),
    ]  # fmt: skip
    return {
        "discovery": {
            "upstreams": [{"url": url, "pool": pool, "names": [pool]} for pool, url in urls]
        },
        "flow": {"hold_timeout_s": 0.2},
        "timeouts": {"first_token_s": 2.0, "first_token_per_1k_s": 0.0, "progress_s": 1.0},
        "health": {"ejection_s": 1.0, "max_ejection_s": 3.0, "slow_start_s": 0.0},
    }


def _upstreams(engines: dict[str, ServeProcess]) -> str:
    return yaml.safe_dump({"upstreams": [{"url": engines["steady"].url, "pool": "spare"}]})
