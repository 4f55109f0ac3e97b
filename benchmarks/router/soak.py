"""A router under prompts that nobody ever sent before: its index and its memory have to stay flat.

    python benchmarks/router/soak.py --url http://127.0.0.1:8080 --pid PID --minutes 120

Asks a running router (its process's id is for its memory) with unique prefixes and prints, every so
often, the route keys that it knows, the bytes of its index and its resident memory. Ends with the
slope of the second half, and with status 1 where that is above `--max-mib-per-hour`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB = 2**20
_GAUGE = r"^octavo_router_{name}(?:\{{[^}}]*\}})? (\S+)$"


class Sample(NamedTuple):
    """How large a router is at a moment."""

    at_s: float
    num_keys: int
    index_bytes: int
    rss_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.at_s:8.0f} s  {self.num_keys:9d} keys  index {self.index_bytes / MIB:7.2f} MiB"
            f"  resident {self.rss_bytes / MIB:7.1f} MiB"
        )


def prompts(seed: int, num_words: int) -> Iterator[str]:
    """None begins like another one."""
    for number in count():
        yield f"{seed}-{number} " + " ".join(f"w{number * 31 + at}" for at in range(num_words))


async def ask(client: httpx.AsyncClient, model: str, source: Iterator[str], until_s: float) -> int:
    """One request after the other; how many there were. Raises where one is not answered."""
    num_requests = 0
    while time.monotonic() < until_s:
        body = {
            "model": model, "max_tokens": 1, "messages": [{"role": "user", "content": next(source)}]
        }  # fmt: skip
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"the router answered {answer.status_code}: {answer.text[:200]}")
        num_requests += 1
    return num_requests


async def sample(client: httpx.AsyncClient, pid: int, began_s: float) -> Sample:
    page = (await client.get("/metrics")).text
    return Sample(
        time.monotonic() - began_s,
        int(gauge(page, "index_keys")),
        int(gauge(page, "index_memory_bytes")),
        resident_bytes(pid),
    )


def resident_bytes(pid: int) -> int:
    rss = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if rss is None:
        raise RuntimeError(f"process {pid} has no resident memory: is it the router's?")
    return int(rss[1]) * 1024


def gauge(page: str, name: str) -> float:
    """The sum over its labels."""
    return sum(map(float, re.findall(_GAUGE.format(name=name), page, re.MULTILINE)))


def slope(samples: Sequence[Sample]) -> float:
    """Bytes of resident memory a second over the second half: by least squares."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    mean_at = sum(one.at_s for one in half) / len(half)
    mean_rss = sum(one.rss_bytes for one in half) / len(half)
    spread = sum((one.at_s - mean_at) ** 2 for one in half)
    return sum((one.at_s - mean_at) * (one.rss_bytes - mean_rss) for one in half) / spread


async def soak(
    url: str, pid: int, *, model: str, duration_s: float, every_s: float, num_clients: int = 8,
    num_words: int = 200, seed: int = 0, tell: bool = True,
) -> tuple[list[Sample], int]:  # fmt: skip
    """Samples over the whole time, and the number of requests."""
    began_s = time.monotonic()
    until_s = began_s + duration_s
    source = prompts(seed, num_words)
    samples: list[Sample] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        asyncio.TaskGroup() as tasks,
    ):
        asking = [
            tasks.create_task(ask(client, model, source, until_s)) for _ in range(num_clients)
        ]
        while time.monotonic() < until_s:
            await asyncio.sleep(min(every_s, max(0.0, until_s - time.monotonic())))
            samples.append(await sample(client, pid, began_s))
            if tell:
                print(samples[-1], flush=True)
    return samples, sum(task.result() for task in asking)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of the router")
    parser.add_argument("--pid", type=int, required=True, help="of its process")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--words", type=int, default=200, help="of each prompt")
    parser.add_argument("--max-mib-per-hour", type=float, default=2.0)
    flags = parser.parse_args()
    samples, num_requests = asyncio.run(
        soak(
            flags.url, flags.pid, model=flags.model, duration_s=60.0 * flags.minutes,
            every_s=flags.every, num_clients=flags.clients, num_words=flags.words,
        )
    )  # fmt: skip
    per_hour = slope(samples) * 3600.0 / MIB
    print(f"{num_requests} requests; resident memory grew by {per_hour:.2f} MiB an hour")
    return int(per_hour > flags.max_mib_per_hour)


if __name__ == "__main__":
    sys.exit(main())
