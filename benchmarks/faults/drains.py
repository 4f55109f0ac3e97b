"""Everything is replaced in a loop, engine by engine and router by router: nobody may notice.

    python -m benchmarks.faults.drains [--minutes M] [--clients N] [--pause S] [--json FILE]

Three simulated engines and two routers, processes of their own, under clients that send requests of
every kind of `benchmarks.faults.answers` and compare each answer. In turn an engine or a router
gets SIGTERM, must end with status 0, and is started again. Every third engine has a hundredth of a
second to drain, so that what it was computing goes on elsewhere. Clients choose a router as a
Service does: one that was ready when it was looked at last, a fifth of a second ago where there is
time for it, over a new connection. A router that ends takes new connections for ten seconds more.
Clients do not retry.

Ends with status 1 where a request failed or an answer was another one, or a process did not end
well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx

from benchmarks.faults.answers import CASES
from benchmarks.faults.bounds import judge
from benchmarks.faults.clients import TIMEOUT_S, Clients, expected_answers, until
from benchmarks.router.overload import Verdict
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES: Final = 3
ROUTERS: Final = 2
LOOK_S: Final = 0.2
ENDS_WITHIN_S: Final = 120.0
READY_WITHIN_S: Final = 300.0  # on a machine that does much else
SHORT_DRAIN: Final = ("--shutdown-timeout", "0.01")
_SIM: Final = ("--device", "sim", "--served-model-name", "m", "--sim-step-base-ms", "20")
_ROUTER: Final = {
    "server": {"accept_while_draining_s": 10, "drain_timeout_s": 100},
    "flow": {"queue_timeout_s": 600, "hold_timeout_s": 600},
}


@dataclass
class Fleet:
    """Engines keep their ports; a new router has another one, and is there before one leaves."""

    folder: Path
    engines: list[Server] = field(default_factory=list)
    routers: list[Server] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)  # routers, as a Service knows them
    problems: list[str] = field(default_factory=list)
    longest_look_s: float = 0.0  # between two looks at them
    _numbers: count[int] = field(default_factory=count)

    def start_engine(self, port: int, *flags: str) -> Server:
        command = [sys.executable, "-m", "octavo.cli", "serve", "demo://smollm2", *_SIM,
                   "--port", str(port), *flags]  # fmt: skip
        log = self.folder / f"engine-{next(self._numbers)}.log"
        return Server.start(command, port=port, log=log, ready="/ready", within_s=READY_WITHIN_S)

    def start_router(self) -> Server:
        port = free_port()
        config = self.folder / "router.yaml"
        config.write_text(json.dumps(_ROUTER))  # which is YAML
        command = [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port",
                   str(port), "--config", str(config),
                   "--upstreams", ",".join(engine.url for engine in self.engines)]  # fmt: skip
        log = self.folder / f"router-{next(self._numbers)}.log"
        return Server.start(command, port=port, log=log, ready="/ready", within_s=READY_WITHIN_S)

    def stop(self) -> None:
        for server in (*self.routers, *self.engines):
            server.stop()

    async def replace_engine(self, number: int, *flags: str) -> None:
        old = self.engines[number]
        port = int(old.url.rpartition(":")[2])
        await self._end(old, "an engine")
        self.engines[number] = await asyncio.to_thread(self.start_engine, port, *flags)
        for router in self.routers:
            if not await _sees_all(router.url):
                self.problems.append("an engine did not come back to a router")

    async def replace_router(self) -> None:
        self.routers.append(await asyncio.to_thread(self.start_router))
        new = self.routers[-1].url
        await _sees_all(new)
        await until(lambda: new in self.ready, READY_WITHIN_S)
        await self._end(self.routers.pop(0), "a router")

    async def _end(self, server: Server, name: str) -> None:
        process = server.process
        process.terminate()
        if not await until(lambda: process.poll() is not None, ENDS_WITHIN_S):
            self.problems.append(f"{name} did not end within {ENDS_WITHIN_S:g} s of SIGTERM")
        elif process.returncode:
            self.problems.append(f"{name} ended with {process.returncode}")
        await asyncio.to_thread(server.stop)  # what it may have left

    async def look(self) -> None:
        """Which routers are ready, for ever."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            looked_at = time.monotonic()
            while True:
                self.ready = [
                    router.url for router in list(self.routers) if await _is_ready(client, router)
                ]
                now = time.monotonic()
                self.longest_look_s = max(self.longest_look_s, now - looked_at)
                looked_at = now
                await asyncio.sleep(LOOK_S)


async def _is_ready(client: httpx.AsyncClient, router: Server) -> bool:
    try:
        return (await client.get(f"{router.url}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def _sees_all(url: str) -> bool:
    """A router knows all engines as ready, soon."""
    ends_at = time.monotonic() + READY_WITHIN_S
    async with httpx.AsyncClient(timeout=5.0) as client:
        while time.monotonic() < ends_at:
            try:
                state = (await client.get(f"{url}/octavo/v1/state")).json()
            except (httpx.HTTPError, ValueError):
                state = {"endpoints": []}
            if sum(one["state"] == "ready" for one in state["endpoints"]) == ENGINES:
                return True
            await asyncio.sleep(LOOK_S)
    return False


async def play(fleet: Fleet, minutes: float, num_clients: int, pause_s: float) -> Verdict:
    verdict = Verdict("rolling")
    rng = random.Random(1)
    expected = await expected_answers(fleet.engines[0].url, CASES)
    looking = asyncio.create_task(fleet.look())
    await until(lambda: len(fleet.ready) == ROUTERS, READY_WITHIN_S)
    clients = Clients(
        lambda: rng.choice(fleet.ready), expected, pause_s=pause_s, keeps_connections=False
    )
    running = asyncio.create_task(clients.run(num_clients))
    replaced: Counter[str] = Counter()
    ends_at = time.monotonic() + 60.0 * minutes
    try:
        for turn in cycle(range(ENGINES + ROUTERS)):
            if time.monotonic() > ends_at:
                break
            if turn < ENGINES:
                await fleet.replace_engine(turn, *(SHORT_DRAIN if turn == 1 else ()))
                replaced["engines"] += 1
            else:
                await fleet.replace_router()
                replaced["routers"] += 1
            tally = clients.tally
            print(
                f"  {replaced['engines']} engines, {replaced['routers']} routers,"
                f" {sum(tally.ended.values())} requests, {len(tally.lost)} lost", flush=True,
            )  # fmt: skip
    finally:
        clients.end()
        await asyncio.wait_for(running, TIMEOUT_S)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    tally = clients.tally
    verdict.seen = {
        "engines replaced": replaced["engines"],
        "routers replaced": replaced["routers"],
        "requests": sum(tally.ended.values()),
        "failed": len(tally.lost),
        "changed": len(tally.changed),
        "processes that did not end well": len(fleet.problems),
        "longest, s": tally.longest_s,
        "longest between two looks at the routers, s": fleet.longest_look_s,
    }
    verdict.board = tally.board
    for complaint in (tally.lost + tally.changed + fleet.problems)[:10]:
        verdict.expect(False, complaint[:600])
    judge("rolling", verdict)
    return verdict


def run(minutes: float, num_clients: int = 24, pause_s: float = 0.2) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="octavo-drains-") as name:
        fleet = Fleet(Path(name))
        try:
            for _ in range(ENGINES):
                fleet.engines.append(fleet.start_engine(free_port()))
            for _ in range(ROUTERS):
                fleet.routers.append(fleet.start_router())
            return asyncio.run(play(fleet, minutes, num_clients, pause_s))
        finally:
            fleet.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M")
    parser.add_argument("--clients", type=int, default=24, metavar="N")
    parser.add_argument("--pause", type=float, default=0.2, metavar="S")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    verdict = run(args.minutes, args.clients, args.pause)
    verdict.show()
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(verdict), indent=2) + "\n")
    return 1 if verdict.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
