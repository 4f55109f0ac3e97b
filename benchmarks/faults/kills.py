"""Engines are killed at random times under a hundred live requests: what their clients get of it.

    python -m benchmarks.faults.kills [--kills N] [--clients N] [--model MODEL] [--with FEATURE]...
                                      [--seconds S] [--json FILE]

Two engines behind a router, all of them processes. Requests are of every kind that can be resumed
or repeated: chat, completions, responses and messages, whole and streamed, greedy and seeded, with
tools, a JSON schema, several choices, log-probabilities and stop strings. Each answer is compared
with the one that an engine gave before anything was killed: the same text, calls,
log-probabilities, finish reasons and usage, once. An engine is killed with all its processes, or
only its core, or it is stopped first and killed while its peers wait for it. The next one is killed
when all requests that were under way at the last kill have ended, and both engines serve again.

Features of the engines: `speculation` guesses tokens by n-grams, `tiers` keeps KV blocks in host
memory and on disk behind a small device cache, `adapters` sends half of the requests to a LoRA
adapter.

Ends with status 1 where a bound of `benchmarks/faults/bounds.json` is not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from benchmarks.faults.answers import CASES, Answer, Case, answer_of, body_of, joined
from benchmarks.faults.bounds import judge
from benchmarks.router.overload import Verdict
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port
from tests.fakes.adapters import write_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES: Final = 2
BODIES: Final = 48  # different ones, of all kinds in turn
STALL_S: Final = 3.0  # how long a stopped engine is left before it is killed
PAUSE_S: Final = (0.2, 1.5)  # between the last engine's return and the next kill
TIMEOUT_S: Final = 120.0  # of a request: far beyond what any takes
HOWS: Final = ("all", "core", "stall")
FEATURES: Final = ("speculation", "tiers", "adapters")
ADAPTER: Final = "adapter"
# Of the demo model: inputs and outputs of each layer.
_ADAPTED: Final = {
    f"model.layers.{layer}.self_attn.{name}": shape
    for layer in range(0, 30, 5)
    for name, shape in (("q_proj", (576, 576)), ("v_proj", (576, 192)))
}


@dataclass(frozen=True, slots=True)
class Setup:
    model: str = "demo://smollm2"
    kills: int = 10
    clients: int = 100
    seed: int = 1
    features: tuple[str, ...] = ()
    seconds: float = 3600.0  # no further kill after that

    @property
    def models(self) -> tuple[str, ...]:
        return ("m", ADAPTER) if "adapters" in self.features else ("m",)


@dataclass(slots=True)
class Engine:
    """One engine, started again on its port whenever it was killed."""

    setup: Setup
    port: int
    folder: Path
    server: Server | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        self.server = Server.start(
            [sys.executable, "-m", "octavo.cli", "serve", self.setup.model, "--port",
             str(self.port), "--served-model-name", "m", "--num-threads", "1",
             "--max-num-seqs", str(self.setup.clients), *self._flags()],
            port=self.port, log=self.folder / f"engine-{self.port}-{self.starts}.log",
            ready="/ready",
        )  # fmt: skip

    def _flags(self) -> list[str]:
        features, folder = self.setup.features, self.folder
        has_tiers = "tiers" in features
        flags = ["--kv-cache-memory-bytes", "96MiB" if has_tiers else "512MiB"]
        if has_tiers:
            disk = folder / f"kv-{self.port}"
            disk.mkdir(exist_ok=True)
            flags += ["--kv-offloading-size", "0.25", "--kv-disk-path", str(disk),
                      "--kv-disk-size", "1"]  # fmt: skip
        if "speculation" in features:
            flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
        if "adapters" in features:
            flags += ["--enable-lora", "--lora-modules", f"{ADAPTER}={folder / ADAPTER}"]
        return flags

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def kill(self, how: str) -> None:
        assert self.server is not None
        pid = self.server.process.pid
        if how == "core":  # its server lives, sees it, and ends
            children = psutil.Process(pid).children()
            core = max(children, key=lambda child: child.memory_info().rss, default=None)
            if core is not None:
                core.kill()
                return
        if how == "stall":
            self.server.pause()
            await asyncio.sleep(STALL_S)
        os.killpg(pid, signal.SIGKILL)

    def start_again(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.start()


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    ended: Counter[str] = field(default_factory=Counter)  # by case
    live: dict[int, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    hit: int = 0  # requests that were under way at a kill


async def ask(client: httpx.AsyncClient, case: Case, body: dict[str, Any]) -> Answer:
    """Raises ValueError on anything but one whole answer."""
    if not body.get("stream"):
        response = await client.post(case.path, json=body)
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {response.text[:300]}")
        return answer_of(case, response.json())
    raw = bytearray()
    async with client.stream("POST", case.path, json=body) as response:
        async for piece in response.aiter_bytes():
            raw += piece
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {bytes(raw[:300])!r}")
    return joined(case, bytes(raw))


class Clients:
    """They ask again and again until they are stopped, and compare."""

    def __init__(self, url: str, expected: Sequence[tuple[Case, dict[str, Any], Answer]]) -> None:
        self.tally = Tally()
        self._url = url
        self._expected = expected
        self._count = 0
        self._is_ending = False

    async def run(self, count: int) -> None:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT_S, limits=limits
        ) as client:
            await asyncio.gather(*(self._one(client, random.Random(n)) for n in range(count)))

    def end(self) -> None:
        self._is_ending = True

    async def _one(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._is_ending:
            case, body, wanted = self._expected[rng.randrange(len(self._expected))]
            self._count += 1
            number, tally = self._count, self.tally
            tally.live[number] = case.name
            began_at = time.monotonic()
            try:
                answer = await ask(client, case, body)
                if answer != wanted:
                    tally.changed.append(f"{case.name}: {answer} instead of {wanted}")
            except (ValueError, KeyError, httpx.HTTPError) as error:
                tally.lost.append(f"{case.name}: {type(error).__name__}: {error}")
                print(f"  lost: {tally.lost[-1][:300]}", flush=True)
            finally:
                del tally.live[number]
            tally.ended[case.name] += 1
            tally.longest_s = max(tally.longest_s, time.monotonic() - began_at)


async def until(fact: Any, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if fact():
            return True
        await asyncio.sleep(0.02)
    return False


async def play(setup: Setup, engines: list[Engine], router: Server) -> Verdict:
    verdict = Verdict("kills")
    rng = random.Random(setup.seed)
    expected = await _expected(engines[0].url, setup)
    clients = Clients(router.url, expected)
    tally = clients.tally
    running = asyncio.create_task(clients.run(setup.clients))
    hows: Counter[str] = Counter()
    try:
        await until(lambda: sum(tally.ended.values()) >= setup.clients, TIMEOUT_S)
        began_at = time.monotonic()
        for number in range(setup.kills):
            if time.monotonic() - began_at > setup.seconds:
                break
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            engine, how = rng.choice(engines), rng.choice(HOWS)
            under_way = set(tally.live)
            await engine.kill(how)
            tally.hit += len(under_way)
            hows[how] += 1
            await asyncio.to_thread(engine.start_again)
            ready = await until(lambda: _all_ready(router.url, len(engines)), 60)
            verdict.expect(ready, f"kill {number}: the engine did not come back to the router")
            waited = await until(lambda hit=under_way: not hit & tally.live.keys(), TIMEOUT_S)
            verdict.expect(waited, f"kill {number}: requests did not end")
            print(
                f"  {number + 1} of {setup.kills}: {how}, {len(under_way)} under way,"
                f" {len(tally.lost)} lost, {len(tally.changed)} changed", flush=True,
            )  # fmt: skip
    finally:
        clients.end()
        await asyncio.wait_for(running, TIMEOUT_S)
    verdict.seen = {
        "kills": sum(hows.values()),
        "requests": sum(tally.ended.values()),
        "under way at a kill": tally.hit,
        "lost": len(tally.lost),
        "changed": len(tally.changed),
        "longest, s": tally.longest_s,
    }
    for complaint in (tally.lost + tally.changed)[:10]:
        verdict.expect(False, complaint[:600])
    judge("kills", verdict)
    return verdict


async def _expected(url: str, setup: Setup) -> list[tuple[Case, dict[str, Any], Answer]]:
    """Each body, and its answer while nothing goes wrong: the same whole and streamed."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        for number in range(BODIES):
            case = CASES[number % len(CASES)]
            body = body_of(case, number, setup.seed)
            body["model"] = setup.models[number // len(CASES) % len(setup.models)]
            whole = await ask(client, case, body)
            streamed = {**body, "stream": True, **case.streaming}
            parts = await ask(client, case, streamed)
            if whole != parts:
                raise SystemExit(f"{case.name}: whole {whole}, streamed {parts}")
            found += [(case, body, whole), (case, streamed, whole)]
    return found


def _all_ready(url: str, count: int) -> bool:
    try:
        endpoints = httpx.get(f"{url}/octavo/v1/state", timeout=5).json()["endpoints"]
    except (httpx.HTTPError, ValueError):
        return False
    return [one["state"] for one in endpoints] == ["ready"] * count


def run(setup: Setup) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="octavo-kills-") as name:
        folder = Path(name)
        if "adapters" in setup.features:
            write_adapter(folder / ADAPTER, _ADAPTED, rank=8, size=0.05)
        engines = [Engine(setup, free_port(), folder) for _ in range(ENGINES)]
        router: Server | None = None
        try:
            for engine in engines:
                engine.start()
            port = free_port()
            router = Server.start(
                [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port",
                 str(port), "--upstreams", ",".join(engine.url for engine in engines)],
                port=port, log=folder / "router.log", ready="/ready",
            )  # fmt: skip
            return asyncio.run(play(setup, engines, router))
        finally:
            for server in (router, *(engine.server for engine in engines)):
                if server is not None:
                    server.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Setup()
    parser.add_argument("--kills", type=int, default=200, metavar="N")
    parser.add_argument("--clients", type=int, default=default.clients, metavar="N")
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N")
    parser.add_argument("--with", dest="features", action="append", choices=FEATURES, default=[])
    parser.add_argument("--seconds", type=float, default=default.seconds, metavar="S")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    features = tuple(sorted(set(args.features)))
    verdict = run(Setup(args.model, args.kills, args.clients, args.seed, features, args.seconds))
    return verdict.report(args.json)


if __name__ == "__main__":
    sys.exit(main())
