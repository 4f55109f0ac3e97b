"""Engines, a router and an operator under a mixed load with faults for long: what grows.

    python -m benchmarks.faults.soak [--minutes M] [--clients N] [--pause S] [--model MODEL]
                                     [--no-operator] [--json FILE] [--samples FILE]

Two engines behind a router, processes of their own. Clients send requests of all kinds of
`benchmarks.faults.answers`; one in ten leaves in the midst of its stream, one in ten is refused,
and every few minutes one engine stalls for a second. An operator has an API server of its own, in
which LLMDeployments change all the time, and which is killed and replaced every ten minutes.

Every ten seconds, the resident memory, the descriptors and the threads of each process and its
children are noted. The slope of each is the median of the slopes between all pairs of samples after
the first quarter (Theil-Sen): single peaks do not move it. How sure it is, its range says: the
least and the most that it comes to where any one eighth of the run is left out. Ends with status 1
where a request failed that should not, a block is left, an LLMDeployment does not come to rest, or
in an hour and more a process grew by over 1 MiB an hour.

With `--samples` each note is a line of JSON in a file, to be read while it runs or after it was
stopped early. `--pause` is the mean pause of a client between two requests: seconds of it leave a
shared machine to others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from benchmarks.faults.answers import CASES, body_of
from benchmarks.faults.bounds import judge
from benchmarks.faults.clients import limits_of
from benchmarks.faults.operated import AWAY_EVERY_S, OperatedCluster, operated
from benchmarks.router.overload import Verdict
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLE_S: Final = 10.0
STALL_EVERY_S: Final = 150.0
STALL_S: Final = 1.0
TURN_S: Final = 1.0
PAUSE_S: Final = 0.175
TIMEOUT_S: Final = 120.0
_LONG_MINUTES: Final = 60.0
_MIB: Final = 2**20
_MAX_PAIRS: Final = 200_000
_PARTS: Final = 8
_BLOCKS: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many clients, how hasty; where the samples go."""

    minutes: float
    clients: int
    pause_s: float = PAUSE_S
    samples: Path | None = None


@dataclass(slots=True)
class Resources:
    """Samples of one process and its children."""

    name: str
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, pid: int, at_s: float) -> None:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        self.at_s.append(at_s)
        self.values["MiB"].append(sum(one.memory_info().rss for one in family) / _MIB)
        self.values["descriptors"].append(sum(one.num_fds() for one in family))
        self.values["threads"].append(sum(one.num_threads() for one in family))

    def latest(self) -> dict[str, float]:
        return {kind: round(found[-1], 2) for kind, found in self.values.items()}

    def slopes(self) -> dict[str, float]:
        """Of each, in an hour."""
        return {kind: slope(self.at_s, found) * 3600 for kind, found in self.values.items()}

    def range(self) -> tuple[float, float]:
        """Between which bounds the slope of the memory lies, in an hour."""
        low, high = slope_range(self.at_s, self.values["MiB"])
        return low * 3600, high * 3600


def slope(at_s: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes of all pairs behind the first quarter; 0 where there are none."""
    points = list(zip(at_s, values, strict=True))[len(at_s) // 4 :]
    pairs = list(combinations(points, 2))[:_MAX_PAIRS]
    return statistics.median((b - a) / (y - x) for (x, a), (y, b) in pairs) if pairs else 0.0


def slope_range(at_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The least and the most of the slopes without any one of its parts: samples of a process are
    much alike for minutes, so what single ones scatter by would promise too much."""
    found = []
    for part in range(_PARTS):
        begin, end = (len(at_s) * number // _PARTS for number in (part, part + 1))
        rest = [*range(begin), *range(end, len(at_s))]
        found.append(slope([at_s[one] for one in rest], [values[one] for one in rest]))
    return min(found), max(found)


@dataclass(slots=True)
class Load:
    """Clients that pause after each request, and what became of their requests."""

    url: str
    seed: int
    pause_s: float = PAUSE_S
    ended: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    is_over: bool = False

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits_of(clients)
        ) as client:
            await asyncio.gather(*(self._one(client, random.Random(n)) for n in range(clients)))

    async def _one(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self.is_over:
            await asyncio.sleep(rng.uniform(0.3, 1.7) * self.pause_s)
            number = rng.randrange(10**9)
            case = rng.choice(CASES)
            body = body_of(case, number, self.seed) | {"stream": rng.random() < 0.7}
            how = rng.random()
            try:
                if how < 0.1:
                    await self._refused(client, case.path, body)
                elif how < 0.2:
                    await self._left(client, case.path, body | {"stream": True})
                else:
                    answer = await client.post(case.path, json=body)
                    if answer.status_code != 200 or b'"error":{' in answer.content:
                        raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
                    self.ended["answered"] += 1
            except (ValueError, httpx.HTTPError) as error:
                self.failed.append(f"{case.name}: {type(error).__name__}: {error}"[:300])

    async def _refused(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        answer = await client.post(path, json=body | {"temperature": -1})
        if answer.status_code != 400:
            raise ValueError(f"{answer.status_code} for a temperature of -1")
        self.ended["refused"] += 1

    async def _left(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_bytes():
                break
        self.ended["left"] += 1


async def play(
    plan: Plan, engines: list[Server], router: Server, cluster: OperatedCluster | None
) -> Verdict:
    verdict = Verdict("soak")
    load = Load(router.url, int(time.time()), plan.pause_s)
    running = asyncio.create_task(load.run(plan.clients))
    servers = {f"engine {at}": server for at, server in enumerate(engines)} | {"router": router}
    if cluster is not None:
        servers["operator"] = cluster.operator
    watched = [Resources(name) for name in servers]
    rng, began_at = random.Random(load.seed), time.monotonic()
    stall_at = began_at + STALL_EVERY_S
    turning = asyncio.create_task(_turn(cluster)) if cluster is not None else None
    while (now := time.monotonic()) < began_at + plan.minutes * 60:
        for resources in watched:
            resources.take(servers[resources.name].process.pid, now - began_at)
        if plan.samples:
            note(plan.samples, now - began_at, watched, load)
        if now >= stall_at:
            stall_at = now + STALL_EVERY_S
            await _stall(rng.choice(engines))
        await asyncio.sleep(SAMPLE_S)
    load.is_over = True
    await running
    if turning is not None and cluster is not None:
        turning.cancel()
        await asyncio.wait((turning,))
        left = await asyncio.to_thread(cluster.settle)
        verdict.seen["changes of LLMDeployments"] = cluster.changes
        verdict.seen["LLMDeployments that did not come to rest"] = left
        verdict.expect(left == 0, f"{left} LLMDeployments did not come to rest")
    await asyncio.sleep(2.0)
    for resources in watched:
        for kind, found in resources.slopes().items():
            verdict.seen[f"{resources.name}, {kind} an hour"] = round(found, 3)
        low, high = resources.range()
        verdict.seen[f"{resources.name}, MiB an hour, at least"] = round(low, 3)
        verdict.seen[f"{resources.name}, MiB an hour, at most"] = round(high, 3)
        verdict.seen[f"{resources.name}, MiB at the end"] = round(resources.values["MiB"][-1], 1)
    verdict.seen["blocks left, share"] = max([await _held(one.url) for one in engines])
    verdict.seen["requests"] = sum(load.ended.values())
    verdict.seen["failed"] = len(load.failed)
    if plan.minutes >= _LONG_MINUTES:  # in less, caches still fill
        for resources in watched:
            verdict.expect(resources.slopes()["MiB"] <= 1.0, f"{resources.name} grows")
    for complaint in load.failed[:5]:
        verdict.expect(False, complaint)
    judge("soak", verdict)
    return verdict


async def _turn(cluster: OperatedCluster) -> None:
    """Until it is cancelled."""
    away_at = time.monotonic() + AWAY_EVERY_S
    while True:
        await asyncio.to_thread(cluster.turn)
        if time.monotonic() >= away_at:
            away_at = time.monotonic() + AWAY_EVERY_S
            cluster.replace_api_server()
        await asyncio.sleep(TURN_S)


def note(samples: Path, at_s: float, watched: Sequence[Resources], load: Load) -> None:
    """Append one line: a run that is stopped early can be judged by what it had seen."""
    line: dict[str, Any] = {"at_s": round(at_s, 1)}
    line |= {resources.name: resources.latest() for resources in watched}
    line |= {"ended": dict(load.ended), "failed": load.failed[-3:]}
    with samples.open("a") as file:
        file.write(json.dumps(line) + "\n")


async def _stall(server: Server) -> None:
    server.pause()
    await asyncio.sleep(STALL_S)
    server.resume()


async def _held(url: str) -> float:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        text = (await client.get(url + "/metrics")).text
    return max(map(float, _BLOCKS.findall(text)))


def run(model: str, plan: Plan, *, has_operator: bool = True) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as name, ExitStack() as stack:
        cluster = stack.enter_context(operated(Path(name))) if has_operator else None
        servers: list[Server] = []
        try:
            for number in range(2):
                port = free_port()
                servers.append(Server.start(
                    [sys.executable, "-m", "octavo.cli", "serve", model, "--port", str(port),
                     "--served-model-name", "m", "--num-threads", "1",
                     "--kv-cache-memory-bytes", "128MiB"],
                    port=port, log=Path(name) / f"engine-{number}.log", ready="/ready",
                ))  # fmt: skip
            port = free_port()
            upstreams = ",".join(one.url for one in servers)
            router = Server.start(
                [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port",
                 str(port), "--upstreams", upstreams],
                port=port, log=Path(name) / "router.log", ready="/ready",
            )  # fmt: skip
            servers.append(router)
            return asyncio.run(play(plan, servers[:-1], router, cluster))
        finally:
            for server in reversed(servers):
                server.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--pause",
        type=float,
        default=PAUSE_S,
        metavar="S",
        help="mean seconds that a client waits after each request (default: %(default)s)",
    )
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="append each sample there")
    parser.add_argument(
        "--no-operator", action="store_true", help="where there can be no kube-apiserver"
    )
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    plan = Plan(args.minutes, args.clients, args.pause, args.samples)
    verdict = run(args.model, plan, has_operator=not args.no_operator)
    return verdict.report(args.json)


if __name__ == "__main__":
    sys.exit(main())
