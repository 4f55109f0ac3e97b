"""What a request costs a router process, on every mix of `traffic`.

    python -m benchmarks.router.mixes [--mixes plain,tls] [--rounds N] [--seconds N] [--json FILE]

A router on one core, engines and clients on the other, real sockets; medians over the rounds. CPU
time is the router process's own, which neighbours disturb least. To compare two builds, let them
take turns and look at the pairs: `--json` has every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.router import stand
from benchmarks.router.traffic import MIXES, Mix

CONNECTIONS: Final = 48
NUM_ENGINES: Final = 4
FIGURES: Final = ("req_s", "cpu_us", "p50_ms", "p99_ms", "bad")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mixes", default=",".join(MIXES), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run")
    parser.add_argument("--json", metavar="FILE", help="write all runs there as well")
    args = parser.parse_args()
    cores = stand.split_cores()
    names = args.mixes.split(",")
    runs = []
    for _ in range(args.rounds):
        for name in names:
            runs.append(measure(MIXES[name], cores, args.seconds))
            print(f"{name}: {runs[-1]['cpu_us']:.1f} µs", file=sys.stderr, flush=True)
    report(names, runs)
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=1) + "\n")


def measure(mix: Mix, cores: stand.Cores, seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        urls = stack.enter_context(stand.engines(NUM_ENGINES, cores.others, mix))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        config = stand.router_config(mix, folder, collector=urls[0])
        command = [
            sys.executable, "-m", "octavo.cli", "router", "--config", str(config), "--port",
            str(stand.ROUTER_PORT), "--upstreams", ",".join(urls),
        ]  # fmt: skip
        router = stack.enter_context(stand.running(command, cores.router))
        stand.until_answers(stand.ROUTER_PORT, router, within_s=30, mix=mix)
        stand.load(stand.ROUTER_PORT, CONNECTIONS, 1.0, cores.others, mix)  # warm
        before_s = stand.cpu_s(router.pid)
        run = stand.load(stand.ROUTER_PORT, CONNECTIONS, seconds, cores.others, mix)
        used_s = stand.cpu_s(router.pid) - before_s
        return run | {"mix": mix.name, "cpu_us": used_s / max(run["requests"], 1) * 1e6}


def report(names: list[str], runs: list[dict[str, Any]]) -> None:
    print(f"\n{'mix':10}{'req/s':>8}{'CPU µs':>8}{'p50 ms':>8}{'p99 ms':>8}{'bad':>5}")
    weighted = 0.0
    for name in names:
        rows = [run for run in runs if run["mix"] == name]
        found = {key: median(float(row[key]) for row in rows) for key in FIGURES}
        weighted += MIXES[name].weight * found["cpu_us"]
        print(f"{name:10}{found['req_s']:8.0f}{found['cpu_us']:8.1f}{found['p50_ms']:8.2f}"
              f"{found['p99_ms']:8.2f}{found['bad']:5.0f}")  # fmt: skip
    if abs(sum(MIXES[name].weight for name in names) - 1.0) < 1e-9:
        print(f"weighted: {weighted:.1f} µs")


if __name__ == "__main__":
    main()
