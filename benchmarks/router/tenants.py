"""Two tenants want more than there is, one of them ten times as much: what each gets.

    python -m benchmarks.router.tenants [--seconds S] [--json FILE]

Two engines behind a router, processes of their own: `octavo serve --device sim`, the real scheduler
in modelled time. First both tenants have the same weight, then the one that asks for less has three
times the other's. Requests have prompts and answers of all sizes; a client that is refused comes
again after what Retry-After says, a second at most. Tokens of prompts and answers count. Ends with
status 1 where a tenant's share is more than 5 % off.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx

from benchmarks.faults.bounds import judge
from benchmarks.router.overload import Verdict, write_verdicts
from benchmarks.servers import Server, end_cleanly_on_sigterm, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES: Final = 2
SEATS: Final = 8
CLIENTS: Final = {"steady": 24, "aggressor": 240}
WARMUP_S: Final = 10.0
_READY_WITHIN_S: Final = 300.0
_SIM: Final = (
    "--device", "sim", "--served-model-name", "m", "--max-num-seqs", str(SEATS),
    "--sim-step-base-ms", "20", "--sim-decode-token-ms", "0",
)  # fmt: skip


@dataclass
class Tenants:
    """Clients of both, and the tokens that they got while it counted."""

    url: str
    tokens: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    is_counted: bool = False
    is_over: bool = False

    async def run(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=sum(CLIENTS.values()))
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=300.0, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for tenant, number in CLIENTS.items():
                for which in range(number):
                    rng = random.Random(f"{tenant} {which}")
                    group.create_task(self._one(client, tenant, rng))
            await asyncio.sleep(WARMUP_S)
            self.is_counted = True
            await asyncio.sleep(seconds)
            self.is_counted, self.is_over = False, True

    async def _one(self, client: httpx.AsyncClient, tenant: str, rng: random.Random) -> None:
        while not self.is_over:
            body = {
                "model": "m", "ignore_eos": True, "max_tokens": rng.choice((10, 40, 100)),
                "prompt": f"{rng.random()} " + "word " * rng.choice((10, 50, 200)),
            }  # fmt: skip
            answer = await client.post(
                "/v1/completions", json=body, headers={"authorization": f"Bearer {tenant}"}
            )
            if answer.status_code == 200:
                if self.is_counted:
                    self.tokens[tenant] += answer.json()["usage"]["total_tokens"]
            elif answer.status_code in (429, 503) and "retry-after" in answer.headers:
                self.refused[tenant] += self.is_counted
                await asyncio.sleep(min(1.0, float(answer.headers["retry-after"])))
            else:
                self.failed.append(f"{tenant}: {answer.status_code} {answer.text[:200]}")
                await asyncio.sleep(1.0)


def serve(stack: ExitStack, weight: float) -> str:
    """The router's URL. All ends with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    octavo = [sys.executable, "-m", "octavo.cli"]
    engines = []
    for number in range(ENGINES):
        port = free_port()
        command = [*octavo, "serve", "demo://smollm2", *_SIM, "--port", str(port)]
        engines.append(stack.enter_context(_start(command, port, folder / f"engine-{number}.log")))
    port, config = free_port(), folder / "router.yaml"
    settings = {
        "server": {"port": port},
        "discovery": {"upstreams": [{"url": engine.url} for engine in engines]},
        "flow": {
            "keys": [
                {"tenant": tenant, "key": tenant, "weight": weight if tenant == "steady" else 1.0}
                for tenant in CLIENTS
            ],
            "queue_timeout_s": 120,
        },
    }
    config.write_text(json.dumps(settings))  # which is YAML
    command = [*octavo, "router", "--config", str(config)]
    return stack.enter_context(_start(command, port, folder / "router.log")).url


def _start(command: Sequence[str], port: int, log: Path) -> Server:
    return Server.start(command, port=port, log=log, ready="/ready", within_s=_READY_WITHIN_S)


def run(weight: float, seconds: float) -> Verdict:
    with ExitStack() as stack:
        tenants = Tenants(serve(stack, weight))
        began_at = time.monotonic()
        asyncio.run(tenants.run(seconds))
        took_s = time.monotonic() - began_at
    total = max(1, tenants.tokens.total())
    wanted, got = weight / (weight + 1.0), tenants.tokens["steady"] / total
    verdict = Verdict(f"tenants, weights {weight:g} to 1", {
        "tokens counted": total,
        "share of the one that asks for less": got,
        "its weight's share": wanted,
        "off by, of its share": abs(got / wanted - 1.0),
        "off by, of the other's share": abs((1.0 - got) / (1.0 - wanted) - 1.0),
        "refusals of the one that asks for less": tenants.refused["steady"],
        "refusals of the other": tenants.refused["aggressor"],
        "failed": len(tenants.failed),
        "seconds": took_s,
    })  # fmt: skip
    judge("tenants", verdict)
    for complaint in tenants.failed[:3]:
        verdict.expect(False, complaint)
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each part")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args(arguments)
    end_cleanly_on_sigterm()
    verdicts = [run(weight, args.seconds) for weight in (1.0, 3.0)]
    for verdict in verdicts:
        verdict.show()
    return write_verdicts(verdicts, args.json)


if __name__ == "__main__":
    sys.exit(main())
