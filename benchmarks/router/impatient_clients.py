"""Three times what engines can do, requested by clients that do not wait: who is served.

    python -m benchmarks.router.impatient_clients [--quick | --minutes M] [--json FILE] [STORY...]

deadline   each request has five seconds, and says so (x-octavo-timeout-ms)
leave      clients leave after five seconds without a whole answer
streams    the same with streams: they leave in the middle, too

Each in front of one engine alone and of two behind a router, with defaults: `octavo serve --device
sim`, the true scheduler in modelled time. First as much as they can do, then three times that,
then half of it. Ends with status 1 where a bound is not kept:

    goodput under three times the load, of the peak     >= 0.95, from ten seconds on
    p99 of a refusal                                     < 50 ms
    p99 of the whole answers                            <= 5 s: what clients wait
    last refusal after the load has fallen              <= 2 s
    memory in the overload, of each process             grows by < 64 MiB

With `--minutes` the overload lasts so long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.faults.bounds import judge as keep_bounds
from benchmarks.router.overload import Verdict, free_port, write_verdicts
from benchmarks.servers import Server
from octavo.bench.report import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

Story = Literal["deadline", "leave", "streams"]
STORIES: Final[tuple[Story, ...]] = ("deadline", "leave", "streams")

PATIENCE_S: Final = 5.0
SEATS: Final = 8  # of an engine
STEP_MS: Final = 20.0
_READY_WITHIN_S: Final = 300.0  # on a machine that does much else
TOKENS: Final = 50  # of an answer: a second's worth
_SIM: Final = (
    "--device", "sim", "--served-model-name", "m", "--max-num-seqs", str(SEATS),
    "--sim-step-base-ms", str(STEP_MS), "--sim-decode-token-ms", "0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """How long each part takes."""

    peak_s: float
    learning_s: float  # of the overload, before goodput counts
    overload_s: float  # all of it
    after_s: float


_SAMPLE_S: Final = 2.0  # between two looks at memory
FULL = Scale(peak_s=8.0, learning_s=10.0, overload_s=30.0, after_s=8.0)
QUICK = Scale(peak_s=6.0, learning_s=10.0, overload_s=26.0, after_s=4.0)


@dataclass(slots=True)
class Ending:
    """How one request ended; times since the beginning."""

    sent_s: float
    ended_s: float
    status: int  # 0: its client left
    is_whole: bool
    says_when: bool  # to come again

    @property
    def is_good(self) -> bool:
        return self.is_whole and self.ended_s - self.sent_s <= PATIENCE_S


@dataclass
class Crowd:
    """Clients of one story. Each has a connection of its own."""

    port: int
    story: Story
    endings: list[Ending] = field(default_factory=list)
    began_at: float = field(default_factory=time.perf_counter)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began_at

    async def arrive(self, rate: float, seconds: float, rng: random.Random) -> None:
        """Requests that come when they come; returns when all are over."""
        began_s, due = self.now_s, 0.0
        async with asyncio.TaskGroup() as tasks:
            while (due := due + rng.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, began_s + due - self.now_s))
                tasks.create_task(self.ask(rng.randrange(10**9)))

    async def saturate(self, clients: int, seconds: float, rng: random.Random) -> None:
        """Each asks again as soon as it is answered."""
        until_s = self.now_s + seconds

        async def insist() -> None:
            while self.now_s < until_s:
                await self.ask(rng.randrange(10**9))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(insist())

    async def ask(self, number: int) -> None:
        sent_s = self.now_s
        head, body = b"", b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self.endings.append(Ending(sent_s, self.now_s, 0, False, False))
            return
        try:
            async with asyncio.timeout(None if self.story == "deadline" else PATIENCE_S):
                writer.write(self._request(number))
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        status = int(head.split(b" ", 2)[1]) if head else 0
        is_whole = status == 200 and (
            b"[DONE]" in body and b'"error"' not in body
            if self.story == "streams"
            else b'"finish_reason":"length"' in body
        )
        says_when = b"\r\nretry-after:" in head.lower()
        self.endings.append(Ending(sent_s, self.now_s, status, is_whole, says_when))

    def _request(self, number: int) -> bytes:
        body = json.dumps(
            {
                "model": "m",
                "prompt": f"{number} is the number of this request, which no other has. " * 2,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": self.story == "streams",
            }
        ).encode()
        deadline = f"x-octavo-timeout-ms: {PATIENCE_S * 1e3:.0f}\r\n"
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{deadline if self.story == 'deadline' else ''}\r\n"
        )
        return head.encode() + body


def serve(stack: ExitStack, num_engines: int, *, has_router: bool) -> tuple[int, list[Server]]:
    """The port to ask, and all processes. They end with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    octavo = [sys.executable, "-m", "octavo.cli"]
    ports: list[int] = []
    servers: list[Server] = []
    for number in range(num_engines):
        port = free_port()
        command = [*octavo, "serve", "demo://smollm2", *_SIM, "--port", str(port)]
        log = folder / f"engine-{number}.log"
        servers.append(stack.enter_context(_start(command, port, log)))
        ports.append(port)
    if not has_router:
        return ports[0], servers
    port = free_port()
    upstreams = [{"url": f"http://127.0.0.1:{engine}"} for engine in ports]
    config = folder / "router.yaml"
    config.write_text(json.dumps({"server": {"port": port}, "discovery": {"upstreams": upstreams}}))
    command = [*octavo, "router", "--config", str(config)]
    log = folder / "router.log"
    servers.append(stack.enter_context(_start(command, port, log)))
    return port, servers


def _start(command: Sequence[str], port: int, log: Path) -> Server:
    return Server.start(command, port=port, log=log, ready="/ready", within_s=_READY_WITHIN_S)


@dataclass
class MemoryGrowth:
    """Of each process, from its size when the overload has been felt to its largest in it."""

    servers: Sequence[Server]
    first: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    async def watch(self, after_s: float, seconds: float) -> None:
        await asyncio.sleep(after_s)
        ends_at = time.perf_counter() + seconds - after_s
        while time.perf_counter() < ends_at:
            sizes = [server.memory().anonymous_bytes for server in self.servers]
            self.first = self.first or sizes
            self.most = [max(pair) for pair in zip(sizes, self.most or sizes, strict=True)]
            await asyncio.sleep(_SAMPLE_S)

    @property
    def mib(self) -> float:
        grown = (most - first for first, most in zip(self.first, self.most, strict=True))
        return max(grown, default=0) / 2**20


async def tell(
    story: Story, port: int, capacity: float, scale: Scale, memory: MemoryGrowth
) -> tuple[float, Crowd]:
    """The peak, and who came afterwards: the overload begins at 0, half the load behind it."""
    rng = random.Random(1)
    seats = round(capacity * TOKENS * STEP_MS * 1e-3)
    await Crowd(port, story).saturate(seats, 2.0, rng)  # each engine has been heard of
    crowd = Crowd(port, story)
    await crowd.saturate(seats, scale.peak_s, rng)
    later = Crowd(port, story)
    async with asyncio.TaskGroup() as tasks:  # who came during the overload is there for a while
        tasks.create_task(later.arrive(3.0 * capacity, scale.overload_s, rng))
        tasks.create_task(memory.watch(scale.learning_s, scale.overload_s))
        await asyncio.sleep(scale.overload_s)
        tasks.create_task(later.arrive(0.5 * capacity, scale.after_s, rng))
    peak = sum(one.is_good for one in crowd.endings) / (
        max((one.ended_s for one in crowd.endings), default=1.0)
    )
    return peak, later


def judge(name: str, later: Crowd, peak: float, scale: Scale, grown_mib: float = 0.0) -> Verdict:
    verdict = Verdict(name)
    start, end = scale.learning_s, scale.overload_s
    good = [one for one in later.endings if one.is_good]
    goodput = sum(start <= one.ended_s < end for one in good) / (end - start)
    at_first = sum(one.ended_s < start for one in good) / start
    refused = [one for one in later.endings if one.status in (503, 504) and one.sent_s < end]
    refused_ms = [1e3 * (one.ended_s - one.sent_s) for one in refused if one.sent_s >= start]
    lost = [one for one in later.endings if start <= one.sent_s < end and not one.is_good]
    # Clients that leave after five seconds get no answer that takes longer.
    whole_s = [one.ended_s - one.sent_s for one in later.endings
               if one.is_whole and start <= one.ended_s < end]  # fmt: skip
    lost_late = sum(one.ended_s - one.sent_s > 0.5 for one in lost)
    bad_after = [one.sent_s - end for one in later.endings if one.sent_s >= end and not one.is_good]
    verdict.seen = {
        "peak, whole answers a second": peak,
        "under three times the load": goodput,
        "goodput of the peak": goodput / peak,
        "in the first ten seconds, of the peak": at_first / peak,
        "refused at once, a second": len(refused_ms) / (end - start),
        "p99 of a whole answer, s": percentile(whole_s or [PATIENCE_S + 1.0], 99),
        "grown in the overload, MiB": grown_mib,
        "p50 of a refusal, ms": percentile(refused_ms or [0.0], 50),
        "p99 of a refusal, ms": percentile(refused_ms or [0.0], 99),
        "without an answer after half a second, %": 100.0 * lost_late / max(len(lost), 1),
        "last refusal after the load fell, s": max(bad_after, default=0.0),
    }
    keep_bounds("overload", verdict)
    verdict.expect(bool(refused_ms), "nobody was refused: the load was not felt")
    verdict.expect(
        all(one.says_when for one in refused if one.status == 503), "a refusal without Retry-After"
    )
    return verdict


def run(story: Story, scale: Scale, *, has_router: bool) -> Verdict:
    num_engines = 2 if has_router else 1
    place = "two engines behind a router" if has_router else "one engine alone"
    capacity = num_engines * SEATS / (TOKENS * STEP_MS * 1e-3)
    with ExitStack() as stack:
        port, servers = serve(stack, num_engines, has_router=has_router)
        memory = MemoryGrowth(servers)
        peak, later = asyncio.run(tell(story, port, capacity, scale, memory))
    return judge(f"{story}, {place}", later, peak, scale, memory.mib)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stories", nargs="*", choices=[*STORIES, []], metavar="STORY")
    parser.add_argument("--quick", action="store_true", help="seconds less each")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="of the overload")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args: Any = parser.parse_args(arguments)
    scale = QUICK if args.quick else FULL
    if args.minutes:
        scale = replace(scale, overload_s=max(60.0 * args.minutes, 2 * scale.learning_s))
    verdicts = []
    for story in args.stories or STORIES:
        for has_router in (False, True):
            verdict = run(story, scale, has_router=has_router)
            verdicts.append(verdict)
            verdict.show()
    return write_verdicts(verdicts, args.json)


if __name__ == "__main__":
    sys.exit(main())
