"""What running streams notice of KV blocks that move between engines.

    python -m benchmarks.kv_streams apart [--streams 4] [--tokens 4000] [--prompts 4]
    python -m benchmarks.kv_streams move [--streams 32]

`apart`: streams on the engine that answers, in turns alone and while another engine computes long
prompts that it answers too; behind a router, each engine with half of the cores. Beside it the same
load on one engine with all cores. `move`: an engine drains, and its streams go on on another one,
which has their KV blocks; each must say what it says undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.kv_transfer import MODEL
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port, warn_if_busy
from octavo_engine.config import BLOCK_SIZE
from tests.fakes.kv_transfer_flags import transfer

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_TOKENS = 24  # of a stream that do not count
QUIET_S = 3.0
MOVED_TOKENS = 240
FOLLOWED_S = 2.0  # until a router follows its engines
LIMITS = httpx.Limits(max_connections=None)


class Stream:
    """One answer: when each of its parts came."""

    def __init__(self, name: str, prompt: list[int], num_tokens: int) -> None:
        self.name = name
        self.body: dict[str, Any] = {
            "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        self.begun = asyncio.Event()  # it has said WARM_TOKENS tokens
        self.at: list[float] = []
        self.tokens: list[int] = []

    async def run(self, client: httpx.AsyncClient, url: str) -> Stream:
        async with client.stream("POST", f"{url}/v1/completions", json=self.body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"{self.name}: {event['error']}")
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or []
                    self.tokens += ids
                    self.at += [time.perf_counter()] * len(ids)
                if len(self.at) >= WARM_TOKENS:
                    self.begun.set()
        return self

    def gaps(self, start: float, end: float) -> list[float]:
        pairs = zip(self.at[WARM_TOKENS:], self.at[WARM_TOKENS + 1 :], strict=False)
        return [after - before for before, after in pairs if start <= before and after <= end]


class Stand:
    """Engines and a router of this machine."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder

    def engine(self, name: str, *flags: str) -> Server:
        port = free_port()
        command = [
            sys.executable, "-m", "octavo.cli", "serve", MODEL, "--device", "cpu",
            "--port", str(port), "--kv-cache-memory-bytes", "1GiB", *flags,
        ]  # fmt: skip
        return self._stack.enter_context(
            Server.start(command, port=port, log=self._folder / f"{name}.log")
        )

    def router(self, settings: dict[str, Any]) -> Server:
        port = free_port()
        self._configure(settings)
        command = [
            sys.executable, "-m", "octavo.cli", "router", "--config", str(self._config),
            "--port", str(port),
        ]  # fmt: skip
        server = self._stack.enter_context(
            Server.start(command, port=port, log=self._folder / "router.log", ready="/v1/models")
        )
        time.sleep(FOLLOWED_S)
        return server

    def reload(self, router: Server, settings: dict[str, Any]) -> None:
        """It knows the settings' engines after FOLLOWED_S."""
        self._configure(settings)
        router.process.send_signal(signal.SIGHUP)

    @property
    def _config(self) -> Path:
        return self._folder / "router.json"

    def _configure(self, settings: dict[str, Any]) -> None:
        self._config.write_text(json.dumps(settings))


def tokens_of(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 40000) for _ in range(count)]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def load(url: str, args: argparse.Namespace, chance: random.Random) -> tuple[float, float]:
    """p99 between tokens of the running streams: alone, and while prompts arrive. In turns, since
    what the streams have said themselves makes their steps longer."""
    streams = [
        Stream(f"stream {number}", tokens_of(chance, 64), 7000) for number in range(args.streams)
    ]
    quiet: list[tuple[float, float]] = []
    loaded: list[tuple[float, float]] = []
    async with httpx.AsyncClient(timeout=600, limits=LIMITS) as client:
        running = [asyncio.create_task(one.run(client, url)) for one in streams]
        await asyncio.gather(*(one.begun.wait() for one in streams))
        for number in range(args.prompts + 1):
            start = time.perf_counter()
            await asyncio.sleep(QUIET_S)
            middle = time.perf_counter()
            quiet.append((start, middle))
            if number < args.prompts:
                await Stream("prompt", tokens_of(chance, args.tokens), 4).run(client, url)
                loaded.append((middle, time.perf_counter()))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if any(one.at[-1] < quiet[-1][0] for one in streams):
        raise SystemExit("the streams ended before the prompts: give them fewer")
    alone, meanwhile = (
        [gap for one in streams for turn in turns for gap in one.gaps(*turn)]
        for turns in (quiet, loaded)
    )
    seconds = sum(end - start for start, end in loaded)
    print(f"  {len(alone)} and {len(meanwhile)} gaps; prompts took {seconds:.1f} s")
    return p99(alone), p99(meanwhile)


def apart(args: argparse.Namespace, stand: Stand) -> None:
    cores = len(os.sched_getaffinity(0))
    half = ("--num-threads", str(max(1, cores // 2)))
    first = stand.engine("prefill", *half, *transfer("kv_producer"))
    second = stand.engine("decode", *half, *transfer("kv_consumer"))
    router = stand.router(
        {
            "routing": {"policy": "prefill-decode"},
            "discovery": {
                "upstreams": [
                    {"url": first.url, "role": "prefill"}, {"url": second.url, "role": "decode"}
                ]
            },
        }
    )  # fmt: skip
    for name, server in (("apart", router), ("one engine", None)):
        if server is None:
            for done in (router, first, second):
                done.stop()
            server = stand.engine("one")
        quiet, loaded = asyncio.run(load(server.url, args, random.Random(3)))
        print(
            f"{name}: p99 between tokens {quiet * 1e3:.1f} ms alone, {loaded * 1e3:.1f} ms while "
            f"prompts of {args.tokens} tokens arrive: {loaded / quiet:.2f} times"
        )


async def run_all(
    url: str,
    streams: list[Stream],
    drained: Server | None = None,
    begun: Callable[[], None] = lambda: None,
) -> tuple[float, list[int]]:
    """When the engine was sent its end, and how many tokens each stream had then. `begun` is called
    FOLLOWED_S before."""
    sent_at, counts = 0.0, []
    async with httpx.AsyncClient(timeout=600, limits=LIMITS) as client:
        running = [asyncio.create_task(one.run(client, url)) for one in streams]
        if drained is not None:
            await asyncio.gather(*(one.begun.wait() for one in streams))
            begun()
            await asyncio.sleep(FOLLOWED_S)
            sent_at = time.perf_counter()
            drained.process.send_signal(signal.SIGTERM)
            counts = [len(one.at) for one in streams]
        await asyncio.gather(*running)
    return sent_at, counts


def computed_and_loaded(url: str) -> tuple[float, float]:
    """Prompt tokens that an engine computed, and KV blocks that it got from the other one."""
    sums = {"octavo_prompt_tokens_cached": 0.0, "octavo_prompt_tokens": 0.0, "peer": 0.0}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        if name.startswith("octavo_kv_tier_hit_blocks_total") and 'tier="peer"' in name:
            sums["peer"] += float(value)
        elif name.startswith("octavo_prompt_tokens_total"):
            sums["octavo_prompt_tokens"] += float(value)
        elif name.startswith("octavo_prompt_tokens_cached_total"):
            sums["octavo_prompt_tokens_cached"] += float(value)
    computed = sums["octavo_prompt_tokens"] - sums["octavo_prompt_tokens_cached"]
    return computed, sums["peer"]


def move(args: argparse.Namespace, stand: Stand) -> None:
    seats = ("--max-num-seqs", str(args.streams + 8))
    chance = random.Random(5)
    prompts = [tokens_of(chance, 200) for _ in range(args.streams)]
    first = stand.engine("first", *seats, *transfer("kv_both", migration_s=5))
    router = stand.router({"discovery": {"upstreams": [{"url": first.url}]}})
    alone = [Stream(f"stream {n}", prompt, MOVED_TOKENS) for n, prompt in enumerate(prompts)]
    asyncio.run(run_all(router.url, alone))
    second = stand.engine("second", *seats, *transfer("kv_both"))
    before_them, _ = computed_and_loaded(second.url)
    moved = [Stream(f"stream {n}", prompt, MOVED_TOKENS) for n, prompt in enumerate(prompts)]
    both = {"discovery": {"upstreams": [{"url": first.url}, {"url": second.url}]}}
    # All of them begin on the engine that drains: the router knows the other one only then.
    sent_at, counts = asyncio.run(
        run_all(router.url, moved, first, lambda: stand.reload(router, both))
    )
    pauses, num_needed = [], 0
    for one, before in zip(moved, alone, strict=True):
        if one.tokens != before.tokens:
            raise SystemExit(f"{one.name} said something else")
        gaps = enumerate(zip(one.at, one.at[1:], strict=False), 1)
        pause, num_said = max(
            (after - max(at, sent_at), count) for count, (at, after) in gaps if after > sent_at
        )
        pauses.append(pause)
        # All but the last token was computed; blocks are of 16 tokens.
        num_needed += -(-(len(prompts[0]) + num_said - 1) // BLOCK_SIZE)
    computed, blocks = computed_and_loaded(second.url)
    computed -= before_them
    usual = statistics.median(
        after - at for one in alone for at, after in zip(one.at[40:], one.at[41:], strict=False)
    )
    print(
        f"{len(moved)} streams moved after {min(counts)} to {max(counts)} tokens, all with the "
        f"tokens of undisturbed ones; longest pause of each: median "
        f"{statistics.median(pauses) * 1e3:.0f} ms, at most {max(pauses) * 1e3:.0f} ms (between "
        f"two tokens undisturbed: {usual * 1e3:.0f} ms); {blocks:.0f} of {num_needed} blocks "
        f"fetched, {computed:.0f} prompt tokens computed again"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("apart", "move"))
    parser.add_argument("--streams", type=int, help="default: 4, or 32 that move")
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt that arrives")
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    args.streams = args.streams or (4 if args.what == "apart" else 32)
    end_cleanly_on_sigterm()
    warn_if_busy()
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="octavo-kv-") as folder:
        stand = Stand(stack, Path(folder))
        try:
            (apart if args.what == "apart" else move)(args, stand)
        finally:
            with contextlib.suppress(Exception):
                stack.close()


if __name__ == "__main__":
    main()
