"""What several processes reach beside one, and whether a lost rank is noticed: every figure that
docs/parallelism.md gives, in one run.

    python -m benchmarks.parallelism [--pairs 6] [--streams 32] [--model demo://smollm2]
                                     [--without ratios|kill] [--json FILE]

For two cores. One process of two threads is compared with two ranks that share each layer, with
two stages, cut by weights and by measured time, and with two engine cores: in turns, with the same
tokens, as `benchmarks.stages` does. Then two engines of two ranks each serve behind a router, and a
rank of one of them is killed under all streams: how many answers are lost or differ, and after how
many seconds its engine is ready again.

Each line has its target. Ends with status 1 where one is missed; a machine that others use misses
them for reasons of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port, warn_if_busy
from benchmarks.stages import compare, settings_of
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.offline.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Sequence

CORES: Final = 2
NEW_TOKENS: Final = 96
READY_WITHIN_S: Final = 120.0
KILL_AFTER_S: Final = 1.0  # all streams have begun, and none has ended
# Of one process: the way, whether with one stream, and the least ratio that is to be reached.
RATIOS: Final = (
    ("tensor", 1, 0.9),
    ("tensor", None, 0.9),
    ("pipeline", None, 0.95),
    ("measured", None, 0.95),
    ("data", None, 0.95),
)


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    value: float
    target: float
    is_most: bool = False  # the target is the most that it may be, not the least
    note: str = ""

    @property
    def is_reached(self) -> bool:
        return self.value <= self.target if self.is_most else self.value >= self.target

    def __str__(self) -> str:
        sign = "<=" if self.is_most else ">="
        verdict = "reached" if self.is_reached else "MISSED"
        return f"{self.what:48} {self.value:8.3f}  {sign} {self.target:<6g} {verdict}  {self.note}"


def ratios(model: str, streams: int, pairs: int) -> list[Figure]:
    config = EngineConfig(
        model=model,
        device="cpu",
        max_model_len=256,
        num_threads=CORES,
        scheduler=SchedulerConfig(max_num_seqs=streams),
    )
    found = []
    with LLM.from_config(config) as alone:
        for way, few, target in RATIOS:
            count = few or streams
            with LLM.from_config(config.replace(**settings_of(way, CORES))) as other:
                one = compare(alone, other, way, count, pairs)
            note = f"{one.tokens_per_s:.0f} and {one.alone_tokens_per_s:.0f} tokens/s at best"
            what = f"{way}, {count} streams, beside one process"
            found.append(Figure(what, one.ratio, target, note=note))
            print(found[-1], flush=True)
    return found


def lost_rank(model: str, streams: int) -> list[Figure]:
    """A rank is killed under all streams of two engines of two ranks behind a router."""
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as name, ExitStack() as ends:
        folder = Path(name)
        engines = [ends.enter_context(_engine(model, folder, streams)) for _ in range(2)]
        router = ends.enter_context(_router(folder, engines))
        answers, back_s, hit = asyncio.run(_killed_under(streams, engines, router))
    wanted, found = answers
    lost = sum(answer is None for answer in found)
    changed = sum(a is not None and a != b for a, b in zip(found, wanted, strict=True))
    note = f"{hit} of {streams} streams were on the engine that lost a rank"
    figures = [
        Figure("a rank is killed: streams lost", lost, 0, is_most=True, note=note),
        Figure("a rank is killed: streams that differ", changed, 0, is_most=True),
        Figure("a rank is killed: s until its engine is ready", back_s, 10, is_most=True),
    ]
    for figure in figures:
        print(figure, flush=True)
    return figures


def _engine(model: str, folder: Path, streams: int) -> Server:
    port = free_port()
    flags = ("--device", "cpu", "--tensor-parallel-size", str(CORES), "--num-threads", str(CORES),
             "--max-num-seqs", str(streams), "--max-model-len", "512",
             "--served-model-name", "m")  # fmt: skip
    command = [sys.executable, "-m", "octavo.cli", "serve", model, "--port", str(port), *flags]
    log = folder / f"engine-{port}.log"
    return Server.start(command, port=port, log=log, ready="/ready", within_s=READY_WITHIN_S)


def _router(folder: Path, engines: Sequence[Server]) -> Server:
    port = free_port()
    command = [
        sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port", str(port),
        "--upstreams", ",".join(engine.url for engine in engines),
    ]  # fmt: skip
    log = folder / "router.log"
    return Server.start(command, port=port, log=log, ready="/ready", within_s=READY_WITHIN_S)


async def _killed_under(
    streams: int, engines: Sequence[Server], router: Server
) -> tuple[tuple[list[str | None], list[str | None]], float, int]:
    """The answers before and with the loss of a rank; the seconds until its engine was ready
    again; and how many streams it had."""
    limits = httpx.Limits(max_connections=streams + 2)
    async with httpx.AsyncClient(timeout=300.0, limits=limits) as client:
        wanted = await asyncio.gather(*(_answer(client, router.url, n) for n in range(streams)))
        running = [asyncio.create_task(_answer(client, router.url, n)) for n in range(streams)]
        await asyncio.sleep(KILL_AFTER_S)
        counts = [await _running_on(client, engine.url) for engine in engines]
        victim = engines[counts.index(max(counts))]
        _rank_of(victim).kill()
        killed_at = time.monotonic()
        await asyncio.sleep(0.5)  # until it is seen
        while not await _is_ready(client, victim.url):
            if time.monotonic() - killed_at > READY_WITHIN_S:
                break
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - killed_at
        return (list(wanted), list(await asyncio.gather(*running))), back_s, max(counts)


async def _answer(client: httpx.AsyncClient, url: str, number: int) -> str | None:
    """Of one stream, whole; None: it was lost."""
    body = {"model": "m", "prompt": f"{number} ways to cook rice:", "stream": True, "seed": number,
            "max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}  # fmt: skip
    text, is_done = "", False
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    is_done = True
                elif data:
                    text += json.loads(data)["choices"][0]["text"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        print(f"  lost: {type(error).__name__}: {error}", flush=True)
        return None
    return text if is_done else None


async def _running_on(client: httpx.AsyncClient, url: str) -> int:
    metrics = (await client.get(f"{url}/metrics")).text
    lines = [line for line in metrics.splitlines() if "num_requests_running" in line]
    return max((int(float(line.split()[-1])) for line in lines if line[0] != "#"), default=0)


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


def _rank_of(engine: Server) -> psutil.Process:
    """Its rank 1."""
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return next(c for c in children if "octavo_engine.executor.worker" in c.cmdline())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--streams", type=int, default=32, metavar="N")
    parser.add_argument("--pairs", type=int, default=6, metavar="N")
    parser.add_argument("--without", choices=("ratios", "kill"), action="append", default=[])
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    warn_if_busy()
    figures: list[Figure] = []
    if "ratios" not in args.without:
        figures += ratios(args.model, args.streams, args.pairs)
    if "kill" not in args.without:
        figures += lost_rank(args.model, args.streams)
    if args.json:
        rows: list[dict[str, Any]] = [asdict(one) | {"reached": one.is_reached} for one in figures]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(figure.is_reached for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
