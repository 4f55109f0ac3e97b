"""The figures of this machine, as its users see them: a server process, HTTP, the real model.

    python -m benchmarks.run [--json FILE] [--full]

Each figure is the median of its rounds and stands beside the limit that bounds it. Run it on an
idle machine; nothing is sent anywhere but to this machine's loopback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.limits import Limits, measure_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_WITHIN_S = 120.0
IDLE_S = 5.0
MODEL = "demo://smollm2"
# SmolLM2-135M. Its embedding is also its head, which a prompt needs for its last token only.
NUM_WEIGHTS = 134_515_008
BODY_WEIGHTS = NUM_WEIGHTS - 49_152 * 576


@dataclass(frozen=True, slots=True)
class Weights:
    """A form that the model's weights can take in memory."""

    name: str
    flag: str
    num_bytes: int  # all of them: what one generated token has to read


WEIGHTS = (
    Weights("bf16", "none", 2 * NUM_WEIGHTS),
    # The file's own form: the embedding in 8.5 bits a weight, the layers in 5.
    Weights("4-bit", "auto", (49_152 * 576 * 17 + BODY_WEIGHTS * 10) // 16),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    value: float
    unit: str
    of_limit: float | None = None  # share of what the machine allows
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--full", action="store_true", help="more rounds")
    args = parser.parse_args()
    rounds = 5 if args.full else 2

    limits = measure_limits()
    figures = []
    for figure in measure(limits, rounds):  # each is said as soon as it is known
        print(f"{figure.what}: {figure.value:.3g} {figure.unit}", file=sys.stderr, flush=True)
        figures.append(figure)
    report(limits, figures)
    if args.json:
        document = {"limits": asdict(limits), "figures": [asdict(f) for f in figures]}
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")


def measure(limits: Limits, rounds: int) -> Iterator[Figure]:
    yield from start_up(rounds)
    yield step_overhead()
    for weights in WEIGHTS:
        with serving(MODEL, "--quantization", weights.flag) as (url, process, _):
            if weights is WEIGHTS[0]:
                yield idle(process)
            yield single_stream(url, weights, limits, rounds)
            yield prefill(url, weights, limits, rounds)
            yield from streams(url, weights, rounds)


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes], float]]:
    """A server that is ready, and how many seconds it took to be."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    started_at = time.perf_counter()
    command = [sys.executable, "-m", "octavo.cli", "serve", *flags, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(url):
            if process.poll() is not None or time.perf_counter() - started_at > READY_WITHIN_S:
                sys.exit(f"the server did not get ready: {' '.join(command)}")
            time.sleep(0.01)
        yield url, process, time.perf_counter() - started_at
    finally:
        process.terminate()
        process.wait()


def start_up(rounds: int) -> list[Figure]:
    def seconds(*flags: str) -> float:
        times = []
        for _ in range(rounds + 1):
            with serving(*flags) as (_, _, ready_s):
                times.append(ready_s)
        return statistics.median(times)

    return [
        Figure("start to ready", seconds(MODEL), "s", note="target 3 s"),
        Figure("start to ready, simulator", seconds("--device", "sim"), "s", note="target 1 s"),
    ]


def step_overhead() -> Figure:
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--json", "--sequences", "64"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    [row] = json.loads(done.stdout)
    return Figure("Python per step, 64 sequences", row["total_us"], "µs", note="target 200 µs")


def idle(process: subprocess.Popen[bytes]) -> Figure:
    """CPU of the server and its core while nothing happens."""
    before = cpu_s(process.pid)
    time.sleep(IDLE_S)
    used = cpu_s(process.pid) - before
    return Figure("idle", 100 * used / IDLE_S, "% of a core", note="target below 1 %")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far, from Linux' /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)


def single_stream(url: str, weights: Weights, limits: Limits, rounds: int) -> Figure:
    runs = [
        bench(url, prompts=2, concurrency=1, input_len=32, output_len=128) for _ in range(rounds)
    ]
    per_token_s = statistics.median(run["p50_tpot_ms"] for run in runs) / 1e3
    of_limit = weights.num_bytes / per_token_s / 1e9 / limits.read_gb_s
    what = f"one stream, {weights.name}"
    return Figure(what, 1 / per_token_s, "tok/s", of_limit, "of read bandwidth")


def prefill(url: str, weights: Weights, limits: Limits, rounds: int) -> Figure:
    runs = [
        bench(url, prompts=4, concurrency=1, input_len=1024, output_len=2) for _ in range(rounds)
    ]
    seconds = statistics.median(run["p50_ttft_ms"] for run in runs) / 1e3
    of_limit = 2 * BODY_WEIGHTS * 1024 / seconds / 1e9 / limits.gemm_gflop_s
    what = f"prompt of 1024, {weights.name}"
    return Figure(what, 1024 / seconds, "tok/s", of_limit, "of float32 GEMM peak")


def streams(url: str, weights: Weights, rounds: int) -> list[Figure]:
    runs = [
        bench(url, prompts=64, concurrency=32, input_len=256, output_len=128) for _ in range(rounds)
    ]
    rate = statistics.median(run["output_throughput"] for run in runs)
    itl_ms = statistics.median(run["p50_tpot_ms"] for run in runs)
    return [
        Figure(f"32 streams, 256 in, 128 out, {weights.name}", rate, "tok/s"),
        Figure("the same, per token and stream", itl_ms, "ms"),
    ]


SEEDS = itertools.count(1)  # of prompts: no round may find another's in the cache


def bench(
    url: str, *, prompts: int, concurrency: int, input_len: int, output_len: int
) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            sys.executable, "-m", "octavo.cli", "bench", "serve", "--url", url, "--json", file.name,
            "--num-prompts", str(prompts), "--max-concurrency", str(concurrency),
            "--input-len", str(input_len), "--output-len", str(output_len),
            "--seed", str(next(SEEDS)),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(file.name).read_text())
    return result


def report(limits: Limits, figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{limits.num_cores} cores, {limits.read_gb_s:.1f} GB/s read, "
        f"{limits.gemm_gflop_s:.0f} GFLOP/s float32"
    )
    table = Table("", "value", "unit", "of limit", "", title=title)
    for f in figures:
        share = "" if f.of_limit is None else f"{100 * f.of_limit:.0f} %"
        table.add_row(f.what, f"{f.value:.3g}", f.unit, share, f.note)
    Console().print(table)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=1):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
