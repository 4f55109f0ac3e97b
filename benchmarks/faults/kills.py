"""Engines are killed at random times under a hundred live requests: what their clients get of it.

    python -m benchmarks.faults.kills [--kills N] [--clients N] [--model MODEL] [--with FEATURE]...
                                      [--beside FEATURE,...]... [--how HOW]... [--simulated]
                                      [--seconds S] [--json FILE] [--logs FOLDER]

Two engines behind a router, all of them processes; with `--simulated` they have the real scheduler
and no forward pass, which takes little of a processor. Requests are of every kind that can be
resumed or repeated: chat, completions, responses and messages, whole and streamed, greedy and
seeded, with tools, a JSON schema, several choices, log-probabilities and stop strings. Each answer
is compared with the one that an engine gave before anything was killed: the same text, calls,
log-probabilities, finish reasons and usage, once. How an engine is lost, at random, or by `--how`:

all     it is killed with all its processes
core    only its core is killed
memory  the kernel kills a process of it for lack of memory (where control groups can be made)
stall   it is stopped, and killed while its peers wait for it
frozen  it is stopped, and goes on when others have taken over: nothing that it adds may get out

The next one is lost when all requests that were under way at the last loss have ended, and both
engines serve again.

Features of the engines: `speculation` guesses tokens by n-grams, `tiers` keeps KV blocks in host
memory and on disk behind a small device cache, `adapters` sends half of the requests to a LoRA
adapter, `media` serves a model that sees (it is trained first, once, in minutes) and asks it about
pictures as well, never simulated.

Each `--beside` adds two engines, a router and clients of their own with the features that it names
(`none`: with none), to the run: most of a kill is waiting for an engine that starts, so several
pairs lose engines in the time of one. They share the number of kills.

With `--logs` the logs of all processes stay in a folder, those of the routers with a line for each
request: a lost one is named there as it is here.

Ends with status 1 where a bound of `benchmarks/faults/bounds.json` is not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import psutil

from benchmarks.faults.answers import CASES, PICTURE_CASES
from benchmarks.faults.bounds import judge
from benchmarks.faults.clients import TIMEOUT_S, Clients, Tally, expected_answers, until
from benchmarks.faults.memory_group import MemoryGroup
from benchmarks.router.overload import Verdict
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port
from tests.fakes.adapters import write_adapter
from tests.fakes.trained_seeing import trained_seeing_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.faults.answers import Case

ENGINES: Final = 2
STALL_S: Final = 3.0  # how long a stopped engine is left before it is killed
FROZEN_S: Final = 20.0  # before it goes on: longer than the router waits for it
PAUSE_S: Final = (0.2, 1.5)  # between the last engine's return and the next kill
READY_WITHIN_S: Final = 300.0  # of an engine, on a machine that does much else
HOWS: Final = ("all", "core", "memory", "stall", "frozen")
FEATURES: Final = ("speculation", "tiers", "adapters", "media")
NONE: Final = "none"
# So that requests are not refused because the machine is slow: this is about those that are in.
ROUTER: Final = {
    "flow": {"queue_timeout_s": 1200, "hold_timeout_s": 1200},
    "timeouts": {"total_s": 3600, "first_token_s": 300, "progress_s": 15},
}
SIMULATED: Final = ("--device", "sim", "--sim-step-base-ms", "20")
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
    is_simulated: bool = False
    hows: tuple[str, ...] = HOWS

    @property
    def models(self) -> tuple[str, ...]:
        return ("m", ADAPTER) if "adapters" in self.features else ("m",)

    @property
    def cases(self) -> tuple[Case, ...]:
        return (*CASES, *PICTURE_CASES) if "media" in self.features else CASES


@dataclass(slots=True)
class KillCount:
    """Of all pairs of a run."""

    left: int
    ends_at: float  # no further kill after that
    hows: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return sum(self.hows.values())

    def take(self) -> bool:
        """One more kill is due."""
        if self.left <= 0 or time.monotonic() > self.ends_at:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class Engine:
    """One engine, started again on its port whenever it was killed."""

    setup: Setup
    port: int
    folder: Path
    server: Server | None = None
    group: MemoryGroup | None = None  # where such can be made
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        command = [
            sys.executable, "-m", "octavo.cli", "serve", self.setup.model, "--port",
            str(self.port), "--served-model-name", "m", "--num-threads", "1",
            "--max-num-seqs", str(self.setup.clients),
            *(SIMULATED if self.setup.is_simulated else ()), *self._flags(),
        ]  # fmt: skip
        if self.group is not None:
            command = self.group.command(command)
        log = self.folder / f"engine-{self.port}-{self.starts}.log"
        self.server = Server.start(
            command, port=self.port, log=log, ready="/ready", within_s=READY_WITHIN_S
        )

    @property
    def hows(self) -> tuple[str, ...]:
        hows = self.setup.hows
        return tuple(how for how in hows if how != "memory" or self.group is not None)

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
        if how == "memory":
            assert self.group is not None
            await asyncio.to_thread(self.group.exhaust)
            return
        if how in ("stall", "frozen"):
            self.server.pause()
            await asyncio.sleep(STALL_S if how == "stall" else FROZEN_S)
        if how == "frozen":
            self.server.resume()
            return
        os.killpg(pid, signal.SIGKILL)

    def start_again(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


@dataclass(slots=True)
class Pair:
    """Two engines behind a router, and what became of their clients' requests."""

    setup: Setup
    engines: list[Engine]
    router: Server
    tally: Tally = field(default_factory=Tally)
    complaints: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "+".join(self.setup.features) or "plain"

    async def play(self, count: KillCount) -> None:
        setup, url = self.setup, self.router.url
        expected = await expected_answers(
            self.engines[0].url, setup.cases, models=setup.models, seed=setup.seed
        )
        clients = Clients(lambda: url, expected)
        self.tally = clients.tally
        running = asyncio.create_task(clients.run(setup.clients))
        try:
            await until(lambda: sum(self.tally.ended.values()) >= setup.clients, TIMEOUT_S)
            rng = random.Random(setup.seed)
            while count.take():
                await self._lose_one(rng, count)
        finally:
            clients.end()
            await asyncio.wait_for(running, TIMEOUT_S)

    async def _lose_one(self, rng: random.Random, count: KillCount) -> None:
        tally = self.tally
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        engine = rng.choice(self.engines)
        how = rng.choice(engine.hows)
        under_way = set(tally.live)
        try:
            await engine.kill(how)
        except TimeoutError:  # the machine is too busy for the kernel to find no memory in time
            how = "all"
            await engine.kill(how)
        tally.hit += len(under_way)
        count.hows[how] += 1
        number = count.done
        if how != "frozen":
            await asyncio.to_thread(engine.start_again)
        if not await _are_all_ready(self.router.url):
            self.complaints.append(f"kill {number}: the engine did not come back to the router")
        if not await until(lambda: not under_way & tally.live.keys(), TIMEOUT_S):
            self.complaints.append(f"kill {number}: requests did not end")
        print(
            f"  {time.strftime('%X')} {number} of {number + count.left}, {self.name}: {how},"
            f" {len(under_way)} under way, {len(tally.lost)} lost, {len(tally.changed)} changed",
            flush=True,
        )  # fmt: skip


async def play(pairs: Sequence[Pair], count: KillCount) -> Verdict:
    """All pairs at once, until there were as many kills as there are to be."""
    await asyncio.gather(*(pair.play(count) for pair in pairs))
    verdict = Verdict("kills")
    tallies = [pair.tally for pair in pairs]
    lost = [f"{pair.name}: {one}" for pair in pairs for one in pair.tally.lost]
    changed = [f"{pair.name}: {one}" for pair in pairs for one in pair.tally.changed]
    verdict.seen = {
        "kills": count.done,
        **{f"kills, {how}": count.hows[how] for how in HOWS},
        "requests": sum(sum(tally.ended.values()) for tally in tallies),
        "under way at a kill": sum(tally.hit for tally in tallies),
        "lost": len(lost),
        "changed": len(changed),
        "longest, s": max(tally.longest_s for tally in tallies),
    }
    for pair in pairs:
        prefix = f"{pair.name}, " if len(pairs) > 1 else ""
        verdict.board |= {prefix + case: counts for case, counts in pair.tally.board.items()}
        for complaint in pair.complaints:
            verdict.expect(False, f"{pair.name}: {complaint}")
    for complaint in (lost + changed)[:10]:
        verdict.expect(False, complaint[:600])
    judge("kills", verdict)
    return verdict


async def _are_all_ready(url: str) -> bool:
    """Waits for it. The other pairs go on meanwhile."""
    end = time.monotonic() + READY_WITHIN_S
    async with httpx.AsyncClient(timeout=5) as client:
        while time.monotonic() < end:
            with suppress(httpx.HTTPError, ValueError):
                endpoints = (await client.get(f"{url}/octavo/v1/state")).json()["endpoints"]
                if [one["state"] for one in endpoints] == ["ready"] * ENGINES:
                    return True
            await asyncio.sleep(0.1)
    return False


@contextmanager
def serving(setup: Setup, folder: Path, *, logs_all: bool = False) -> Iterator[Pair]:
    """Starts the pair, and leaves nothing of it but what is in the folder."""
    folder.mkdir(parents=True)
    if "adapters" in setup.features:
        write_adapter(folder / ADAPTER, _ADAPTED, rank=8, size=0.05)
    if "media" in setup.features:
        setup = replace(setup, model=str(trained_seeing_model()), is_simulated=False)
    groups = [MemoryGroup.create(f"octavo-{folder.name}-{number}") for number in range(ENGINES)]
    engines = [Engine(setup, free_port(), folder, group=group) for group in groups]
    router: Server | None = None
    try:
        for engine in engines:
            engine.start()
        port = free_port()
        config = folder / "router.yaml"
        config.write_text(json.dumps(ROUTER))
        router = Server.start(
            [sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port",
             str(port), "--config", str(config),
             "--upstreams", ",".join(engine.url for engine in engines),
             *(("--access-log", "all") if logs_all else ())],
            port=port, log=folder / "router.log", ready="/ready", within_s=READY_WITHIN_S,
        )  # fmt: skip
        yield Pair(setup, engines, router)
    finally:
        if router is not None:
            router.stop()
        for engine in engines:
            engine.stop()
        for group in filter(None, groups):
            group.remove()


def run(setup: Setup, *beside: Setup, logs: Path | None = None) -> Verdict:
    """`setup` has the number of kills and the time of all."""
    with tempfile.TemporaryDirectory(prefix="octavo-kills-") as name, ExitStack() as stack:
        folder = logs or Path(name)
        pairs = [
            stack.enter_context(serving(one, folder / f"kills-{number}", logs_all=logs is not None))
            for number, one in enumerate((setup, *beside))
        ]
        count = KillCount(setup.kills, time.monotonic() + setup.seconds)
        return asyncio.run(play(pairs, count))


def _features(text: str) -> tuple[str, ...]:
    """Raises ArgumentTypeError."""
    names = tuple(sorted(set(text.split(",")) - {NONE, ""}))
    if unknown := set(names) - set(FEATURES):
        raise argparse.ArgumentTypeError(
            f"no such feature: {', '.join(sorted(unknown))}; choose from {', '.join(FEATURES)}, or "
            f"{NONE}"
        )
    return names


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
    parser.add_argument(
        "--beside", action="append", type=_features, default=[], metavar="FEATURE,...",
        help="another pair of engines with these features, or none",
    )  # fmt: skip
    parser.add_argument("--how", dest="hows", action="append", choices=HOWS, help="default: all")
    parser.add_argument("--simulated", action="store_true", help="engines without a forward pass")
    parser.add_argument("--seconds", type=float, default=default.seconds, metavar="S")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep all logs there")
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    features = tuple(sorted(set(args.features)))
    setup = Setup(
        args.model, args.kills, args.clients, args.seed, features, args.seconds, args.simulated,
        tuple(args.hows or HOWS),
    )  # fmt: skip
    beside = [
        replace(setup, features=names, seed=args.seed + number)
        for number, names in enumerate(args.beside, start=1)
    ]
    return run(setup, *beside, logs=args.logs).report(args.json)


if __name__ == "__main__":
    sys.exit(main())
