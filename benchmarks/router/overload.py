"""Many at once, at full scale: slow clients, engines that all refuse, three times what they can do.

    python -m benchmarks.router.overload [--quick] [--json FILE] [STORY...]

slow      ten thousand clients that idle, and ten thousand that drip their heads or do not read,
          while requests pass
storm     every engine answers 503 for a while: what the router's repeats add to that
overload  three times the engines' capacity: what is served, and how soon the rest hears no

Engines and clients share a core, slow clients being a process of their own; the router has another.
Ends with status 1 where something is lost or a bound is not kept; figures of time are shown, not
judged. Beside those of `slow` stands for how much of the time somebody was ready and had no
processor: where that is much, they are this machine's and not the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import uvloop

from benchmarks.router import stand
from benchmarks.router.load import Engine, Load, raise_file_limit
from benchmarks.router.load_process import crowding, joined, waited_s
from octavo.bench.report import percentile

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Mapping, Sequence

_LOOK_S: Final = 0.1  # between two looks
_LOOKS: Final = 600
_FEW_FILES: Final = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """How many, and how long."""

    num_slow: int
    num_crowds: int  # processes of the slow clients; as many workers has the router for them
    rate: float  # of ordinary requests
    seconds: float
    storm_s: float
    work_s: float  # an engine's, for a request
    header_s: float = 10.0  # after which who drips is sent away


FULL = Scale(num_slow=20_000, num_crowds=4, rate=500.0, seconds=20.0, storm_s=5.0, work_s=0.05,
             header_s=60.0)  # fmt: skip
QUICK = Scale(num_slow=300, num_crowds=1, rate=100.0, seconds=2.0, storm_s=1.0, work_s=0.05)


@dataclass
class Verdict:
    """What was seen, and what should not have been."""

    story: str
    seen: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    board: dict[str, tuple[int, int]] = field(default_factory=dict)  # of a case: tried, lost

    def expect(self, is_true: bool, otherwise: str) -> None:
        if not is_true:
            self.complaints.append(otherwise)

    def show(self) -> None:
        print(f"\n{self.story}")
        for name, value in self.seen.items():
            print(f"  {name:44}{value:12.2f}")
        for complaint in self.complaints:
            print(f"  NOT KEPT: {complaint}")

    def report(self, file: str | None) -> int:
        """Shows it, and writes it as JSON where a file is named; the exit status."""
        self.show()
        if file:
            Path(file).write_text(json.dumps(asdict(self), indent=2) + "\n")
        return 1 if self.complaints else 0


def write_verdicts(verdicts: Sequence[Verdict], file: str | None) -> int:
    """As JSON where a file is named; the exit status."""
    if file:
        Path(file).write_text(json.dumps([asdict(one) for one in verdicts], indent=2) + "\n")
    return 1 if any(verdict.complaints for verdict in verdicts) else 0


@dataclass(frozen=True, slots=True)
class Router:
    port: int
    pid: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stories", nargs="*", metavar="STORY", help="slow, storm, overload: all")
    parser.add_argument("--quick", action="store_true", help="a few hundred clients, seconds each")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args()
    if unknown := set(args.stories) - STORIES.keys():
        parser.error(f"no such story: {', '.join(sorted(unknown))}; there are {', '.join(STORIES)}")
    cores = stand.split_cores()
    if cores.others is not None:
        os.sched_setaffinity(0, cores.others)
    verdicts = [
        uvloop.run(STORIES[name](QUICK if args.quick else FULL, cores.router))
        for name in args.stories or STORIES
    ]
    for verdict in verdicts:
        verdict.show()
    return write_verdicts(verdicts, args.json)


@asynccontextmanager
async def routing(
    engines: Sequence[Engine], core: set[int] | None, *, num_workers: int = 1, **settings: Any
) -> AsyncIterator[Router]:
    """A router process in front of them that has heard of them all."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serving()) for engine in engines]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        document = {
            "server": {"port": port, "workers": num_workers},
            "discovery": {"upstreams": [{"url": url} for url in urls]},
            **settings,
        }
        file, log = folder / "router.yaml", folder / "log"
        file.write_text(json.dumps(document))  # which is YAML
        command = [sys.executable, "-m", "octavo.cli", "router", "--config", str(file)]
        with stand.running(command, core, log=log) as process:
            await _until_ready(port, process, log)
            yield Router(port, process.pid)


async def slow(scale: Scale, core: set[int] | None = None) -> Verdict:
    """Half of them idle; of the others nine in ten drip their heads, and one does not read.

    A process has fewer files than all of them need, so there are several of clients and routers.
    """
    verdict = Verdict("Slow clients")
    num_crowds = scale.num_crowds
    files = raise_file_limit(3 * scale.num_slow // num_crowds + 4000)
    # A router counts two files for each client, and who is sent away stays for a moment.
    number = min(scale.num_slow // num_crowds, int((files - 2000) / 2 / 1.4)) * num_crowds
    engines = [Engine() for _ in range(4)]
    limits = {"max_connections": 2 * number}
    flow = {"max_in_flight": number}
    each = number // num_crowds
    readers, heads = each // 20, 9 * each // 20
    numbers = {"idle": each - readers - heads, "head": heads, "reader": readers}
    settings = {"limits": limits, "flow": flow, "timeouts": {"header_s": scale.header_s}}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        async with routing(engines, core, num_workers=num_crowds, **settings) as router:
            alone = await _measured(pool, router, scale)
            before = stand.rss_mib(router.pid)
            async with AsyncExitStack() as crowds:
                leave = [
                    await crowds.enter_async_context(
                        crowding(router.port, f"127.0.0.{2 + which}", **numbers)
                    )
                    for which in range(num_crowds)
                ]
                among = await _measured(pool, router, scale)
                with_them = stand.rss_mib(router.pid)
                crowd = joined([await each() for each in leave])
            left = await _until_gone(router)
            after = await _measured(pool, router, scale)
    per_client_kib = (with_them - before) * 1024 / number
    verdict.seen = {
        "slow clients": number,
        "of them idle": numbers["idle"] * num_crowds,
        "processes of the router that serve": num_crowds,
        "memory of the router for each, KiB": per_client_kib,
        "heads that were ended, and came again": crowd.num_ended.get("head", 0),
        "requests a second of the others": scale.rate,
        "p50 without them, ms": alone.load.percentile_ms(50),
        "p99 without them, ms": alone.load.percentile_ms(99),
        "p50 among them, ms": among.load.percentile_ms(50),
        "p99 among them, ms": among.load.percentile_ms(99),
        "p50 afterwards, ms": after.load.percentile_ms(50),
        "p99 afterwards, ms": after.load.percentile_ms(99),
        "router waited for a processor among them, %": 100.0 * among.router_waited,
        "engines likewise, %": 100.0 * among.engines_waited,
        "who measures likewise, %": 100.0 * among.load_waited,
    }  # fmt: skip
    for load in (alone.load, among.load, after.load):
        good = sum(one.status == 200 for one in load.endings)
        verdict.expect(good == load.num_sent, f"of {load.num_sent} requests {good} were answered")
    verdict.expect(crowd.num_failed == 0, f"{crowd.num_failed} connections were not accepted")
    verdict.expect("idle" not in crowd.num_ended, "idle clients were sent away")
    verdict.expect(sum(crowd.num_open.values()) > 0.9 * number, f"only {crowd.num_open} were there")
    verdict.expect(per_client_kib < 64.0, "a slow client takes 64 KiB and more")
    verdict.expect(left <= 0, f"{left} connections are left after all have gone")
    return verdict


async def storm(
    scale: Scale, core: set[int] | None = None, *, retry: Mapping[str, Any] | None = None
) -> Verdict:
    """The middle third of the load meets engines that refuse everything."""
    verdict = Verdict("Every engine answers 503")
    engines = [Engine(work_s=0.01) for _ in range(4)]
    # The throttle looks at two minutes: it is left out, so that what is seen is the budget's.
    retry = {"throttle_factor": 1e6, **(retry or {})}
    async with routing(engines, core, retry=retry) as router:
        load = Load(router.port, scale.rate)
        running = asyncio.create_task(load.run(3 * scale.storm_s))
        await asyncio.sleep(scale.storm_s)
        seen = sum(engine.num_requests for engine in engines)
        sent = load.num_sent
        for engine in engines:
            engine.is_refusing = True
        await asyncio.sleep(scale.storm_s)
        seen, sent = sum(engine.num_requests for engine in engines) - seen, load.num_sent - sent
        over_at = 2 * scale.storm_s
        for engine in engines:
            engine.is_refusing = False
        await running
    refused = [one for one in load.endings if one.status != 200]
    late = [one.at_s for one in load.endings if one.status != 200 and one.at_s > over_at]
    took_ms = [one.took_s * 1e3 for one in refused] or [0.0]
    verdict.seen = {
        "requests in the storm": sent,
        "requests that engines saw for each": seen / max(sent, 1),
        "refusals": len(refused),
        "p50 of a refusal, ms": percentile(took_ms, 50),
        "p99 of a refusal, ms": percentile(took_ms, 99),
        "last refusal after its end, s": max(late, default=over_at) - over_at,
        "without any answer": load.num_lost,
    }
    verdict.expect(load.num_lost == 0, f"{load.num_lost} requests got no answer")
    verdict.expect(
        seen <= 1.3 * sent + 20, f"engines saw {seen} requests where clients made {sent}"
    )
    verdict.expect(len(refused) > 0.5 * sent, "the storm was not felt")
    verdict.expect({one.status for one in refused} <= {429, 503}, "other errors than 429 and 503")
    verdict.expect(all(one.says_when for one in refused), "a refusal without Retry-After")
    last = [one for one in load.endings if one.at_s > 2.8 * scale.storm_s]
    verdict.expect(all(one.status == 200 for one in last), "it does not end with the storm")
    return verdict


async def overload(scale: Scale, core: set[int] | None = None) -> Verdict:
    """As much as they can do, then three times that."""
    verdict = Verdict("Three times the capacity")
    seats = 4
    engines = [Engine(seats=seats, num_waiting=3 * seats, work_s=scale.work_s) for _ in range(4)]
    capacity = len(engines) * seats / scale.work_s
    flow = {"max_in_flight": seats, "max_queue": 64}
    async with routing(engines, core, flow=flow, retry={"throttle_factor": 1e6}) as router:
        once = Load(router.port, capacity)
        await once.run(scale.seconds)
        done = sum(engine.num_done for engine in engines)
        thrice = Load(router.port, 3 * capacity, seed=1)
        used_s = stand.cpu_s(router.pid)
        await thrice.run(scale.seconds)
        used_s = stand.cpu_s(router.pid) - used_s
        done = sum(engine.num_done for engine in engines) - done
    served = [one for one in thrice.endings if one.status == 200]
    refused = [one for one in thrice.endings if one.status != 200]
    refused_ms = [one.took_s * 1e3 for one in refused] or [0.0]
    served_ms = [one.took_s * 1e3 for one in served] or [0.0]
    goodput = len(served) / scale.seconds
    once_served = sum(one.status == 200 for one in once.endings) / scale.seconds
    verdict.seen = {
        "capacity, requests a second": capacity,
        "served at that rate": once_served,
        "served at three times that": goodput,
        "p50 of an answer, ms": percentile(served_ms, 50),
        "p99 of an answer, ms": percentile(served_ms, 99),
        "refused a second": len(refused) / scale.seconds,
        "p50 of a refusal, ms": percentile(refused_ms, 50),
        "p99 of a refusal, ms": percentile(refused_ms, 99),
        "router's processor time for a request, ms": 1e3 * used_s / max(len(thrice.endings), 1),
        "engines' work that nobody got, %": 100.0 * (1.0 - len(served) / max(done, 1)),
        "without any answer": once.num_lost + thrice.num_lost,
    }
    verdict.expect(once.num_lost + thrice.num_lost == 0, "requests got no answer")
    verdict.expect(
        goodput > 0.5 * once_served,
        f"{goodput:.0f} a second are served, {once_served:.0f} where nobody asks for too much",
    )
    verdict.expect({one.status for one in refused} <= {429, 503}, "other errors than 429 and 503")
    verdict.expect(all(one.says_when for one in refused), "a refusal without Retry-After")
    verdict.expect(len(served) >= 0.95 * done, "engines work for nobody")
    return verdict


STORIES = {"slow": slow, "storm": storm, "overload": overload}


@dataclass(frozen=True, slots=True)
class Measured:
    """A load, and the shares of its time in which processes were ready and had no processor."""

    load: Load
    load_waited: float
    router_waited: float
    engines_waited: float


async def _measured(pool: ProcessPoolExecutor, router: Router, scale: Scale) -> Measured:
    began_at, before = time.monotonic(), [_router_waited_s(router), waited_s(os.getpid())]
    load, load_waited_s = await asyncio.get_running_loop().run_in_executor(
        pool, _load, router.port, scale
    )
    took_s = time.monotonic() - began_at
    now = [_router_waited_s(router), waited_s(os.getpid())]
    waited = [seconds - since for seconds, since in zip(now, before, strict=True)]
    return Measured(load, *(each_s / took_s for each_s in (load_waited_s, *waited)))


def _router_waited_s(router: Router) -> float:
    """The process that waited longest."""
    return max(waited_s(process.pid) for process in stand.tree(router.pid))


def _load(port: int, scale: Scale) -> tuple[Load, float]:
    """In a process of its own: what it measures is not this one's work for the slow clients."""
    load, before = Load(port, scale.rate), waited_s(os.getpid())
    uvloop.run(load.run(scale.seconds))
    return load, waited_s(os.getpid()) - before


async def _until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until completions come back."""
    for _ in range(_LOOKS):
        trial = Load(port, 1000.0)
        await trial.run(0.002)
        if {one.status for one in trial.endings} == {200} and not trial.num_lost:
            return
        if process.poll() is not None:
            said = await asyncio.to_thread(log.read_text)
            raise SystemExit(f"the router ended with {process.returncode}: {said[-2000:]}")
        await asyncio.sleep(_LOOK_S)
    raise SystemExit(f"the router is not ready after {_LOOKS * _LOOK_S:.0f} s")


async def _until_gone(router: Router) -> int:
    """How many files more than a few it still has when nobody is there any more."""
    process = psutil.Process(router.pid)
    processes = [process, *process.children(recursive=True)]
    for _ in range(_LOOKS):
        left = sum(max(0, one.num_fds() - _FEW_FILES) for one in processes)
        if not left:
            break
        await asyncio.sleep(_LOOK_S)
    return left


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
