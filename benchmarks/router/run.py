"""The router's figures beside other routers and the bare proxy, all in one run.

    python -m benchmarks.router.run [--full] [--no-peers] [--json FILE]

The traffic is the mix `plain` of `traffic`. Peers are installed into environments of their own.
Rounds alternate the order; medians are shown. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.router import added_latency, chunks, stand
from benchmarks.router.contenders import BARE, OCTAVO, Contender, install_peers

CONNECTIONS = (32, 256)
ENGINES = 4
IDLE_ENDPOINTS = 100
IDLE_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="longer rounds, and more of them")
    parser.add_argument("--no-peers", action="store_true", help="Octavo and the bare proxy only")
    parser.add_argument("--json", metavar="FILE", help="write all runs there as well")
    args = parser.parse_args()
    rounds, seconds = (5, 10) if args.full else (2, 4)

    cores = stand.split_cores()
    if cores.router is None:
        raise SystemExit("this measurement needs two cores: one for the router, one for the rest")
    # This process drives some of the load: it belongs to the others' core.
    psutil.Process().cpu_affinity(sorted(cores.others or ()))
    contenders = [OCTAVO, BARE, *([] if args.no_peers else install_peers())]
    document = {
        "throughput": throughput(contenders, cores, rounds, seconds),
        "latency": latency(cores, rounds),
        "streams": streams(cores, rounds),
        "idle": idle(cores),
    }
    report(document, contenders)
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")


def throughput(
    contenders: list[Contender], cores: stand.Cores, rounds: int, seconds: int
) -> list[dict[str, Any]]:
    runs = []
    with stand.engines(ENGINES, cores.others) as urls:
        for number in range(rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                command = contender.start(stand.ROUTER_PORT, urls)
                with stand.running(command, cores.router) as process:
                    ready_s = stand.until_answers(stand.ROUTER_PORT, process, within_s=60)
                    for connections in CONNECTIONS:
                        stand.load(stand.ROUTER_PORT, connections, 1, cores.others)  # warm
                        before_s = stand.cpu_s(process.pid)
                        run = stand.load(stand.ROUTER_PORT, connections, seconds, cores.others)
                        used_s = stand.cpu_s(process.pid) - before_s
                        run |= {
                            "router": contender.name,
                            "connections": connections,
                            "ready_s": ready_s,
                            "cpu_us": used_s / max(run["requests"], 1) * 1e6,
                            "rss_mib": stand.rss_mib(process.pid),
                        }
                        runs.append(run)
                        _say(f"{contender.name}, {connections}: {run['req_s']:.0f} req/s")
    return runs


def latency(cores: stand.Cores, rounds: int) -> dict[str, float]:
    """At 500 requests a second, with the engine's own time taken off."""
    direct, routed = [], []
    with stand.engines(ENGINES, cores.others) as urls:
        command = OCTAVO.start(stand.ROUTER_PORT, urls)
        with stand.running(command, cores.router) as process:
            stand.until_answers(stand.ROUTER_PORT, process, within_s=60)
            for number in range(rounds):
                direct.append(
                    added_latency.measure(stand.FIRST_ENGINE_PORT, rate=500, seconds=5, seed=number)
                )
                routed.append(
                    added_latency.measure(stand.ROUTER_PORT, rate=500, seconds=5, seed=number)
                )
    median = statistics.median
    return {
        "direct_p50_ms": median(run.p50_ms for run in direct),
        "direct_p99_ms": median(run.p99_ms for run in direct),
        "routed_p50_ms": median(run.p50_ms for run in routed),
        "routed_p99_ms": median(run.p99_ms for run in routed),
    }


def streams(cores: stand.Cores, rounds: int) -> dict[str, float]:
    """Events a second, with one and with sixteen events to a write of the engine."""
    found = {}
    for events_per_write in (1, 16):
        engine = [
            sys.executable, "-m", "benchmarks.router.chunks", str(stand.FIRST_ENGINE_PORT),
            str(events_per_write),
        ]  # fmt: skip
        rates, straight = [], []
        with stand.running(engine, cores.others):
            url = f"http://127.0.0.1:{stand.FIRST_ENGINE_PORT}"
            with stand.running(OCTAVO.start(stand.ROUTER_PORT, [url]), cores.router) as process:
                stand.until_answers(stand.ROUTER_PORT, process, within_s=60)
                for _ in range(rounds):
                    straight.append(chunks.measure(stand.FIRST_ENGINE_PORT))
                    rates.append(chunks.measure(stand.ROUTER_PORT))
        found[f"{events_per_write}_per_write"] = statistics.median(rates)
        found[f"{events_per_write}_per_write_direct"] = statistics.median(straight)
    return found


def idle(cores: stand.Cores) -> dict[str, float]:
    """Start, memory and idle work; a hundred endpoints that are all there."""
    with stand.engines(IDLE_ENDPOINTS, cores.others) as urls, TemporaryDirectory() as cache:
        command = OCTAVO.start(stand.ROUTER_PORT, urls)
        # As it starts where it was installed: its bytecode is there, which one start leaves behind.
        env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        with stand.running(command, cores.router, env=env) as process:
            stand.until_answers(stand.ROUTER_PORT, process, within_s=60)
        with stand.running(command, cores.router, env=env) as process:
            ready_s = stand.until_answers(stand.ROUTER_PORT, process, within_s=60)
            time.sleep(3)
            before_s = stand.cpu_s(process.pid)
            time.sleep(IDLE_S)
            share = (stand.cpu_s(process.pid) - before_s) / IDLE_S
            return {
                "start_s": ready_s,
                "idle_core_share": share,
                "rss_mib": stand.rss_mib(process.pid),
            }


def report(document: dict[str, Any], contenders: list[Contender]) -> None:
    runs = document["throughput"]
    for connections in CONNECTIONS:
        print(f"\n{connections} connections, one core for the router, the mix plain")
        print(f"{'router':28}{'req/s':>9}{'Octavo is':>11}{'p50 ms':>9}{'p99 ms':>9}"
              f"{'CPU µs':>9}{'RSS MiB':>9}{'bad':>6}")  # fmt: skip
        ours = _median(runs, OCTAVO.name, connections, "req_s")
        for contender in contenders:
            rate = _median(runs, contender.name, connections, "req_s")
            row = [
                _median(runs, contender.name, connections, key)
                for key in ("p50_ms", "p99_ms", "cpu_us", "rss_mib", "bad")
            ]
            print(f"{contender.name:28}{rate:9.0f}{ours / rate:10.2f}x{row[0]:9.2f}{row[1]:9.2f}"
                  f"{row[2]:9.1f}{row[3]:9.0f}{row[4]:6.0f}")  # fmt: skip
    found = document["latency"]
    print("\nAt 500 req/s: p50 {routed_p50_ms:.3f} ms, p99 {routed_p99_ms:.3f} ms; straight to the "
          "engine {direct_p50_ms:.3f} and {direct_p99_ms:.3f} ms".format(**found))  # fmt: skip
    for name, rate in document["streams"].items():
        print(f"Stream events a second, {name.replace('_', ' ')}: {rate:,.0f}")
    found = document["idle"]
    print(f"Start {found['start_s']:.2f} s; {IDLE_ENDPOINTS} idle endpoints take "
          f"{found['idle_core_share']:.2%} of a core; RSS {found['rss_mib']:.0f} MiB")  # fmt: skip


def _median(runs: list[dict[str, Any]], router: str, connections: int, key: str) -> float:
    return statistics.median(
        float(run[key])
        for run in runs
        if run["router"] == router and run["connections"] == connections
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
