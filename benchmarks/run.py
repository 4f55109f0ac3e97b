"""The figures of this machine, as its users see them: a server process, HTTP, the real model.

    python -m benchmarks.run [--full] [--json FILE] [--plot FILE]

Each figure is the median of its rounds and stands beside the limit that bounds it: the least time
in which this machine could read the bytes, or multiply the numbers, measured at the start. Run it
on an idle machine; nothing is sent anywhere but to this machine's loopback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.servers import (
    NotReady,
    Server,
    end_cleanly_on_sigterm,
    free_port,
    warn_if_busy,
)
from octavo.measure import roofline, study
from octavo.measure.batch_limits import batch_best
from octavo.measure.limits import measure_limits
from octavo.measure.shapes import write_shape
from octavo.measure.work import ModelWork, WorkStep
from octavo_engine.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.measure.machine_limits import MachineLimits
    from octavo.measure.study import StepStudy, StudySizes
    from octavo_engine.config import Quantization

IDLE_S = 5.0
MODEL = "demo://smollm2"
LARGER = "1.5b"  # so that nothing is tuned to one small model
OUT = Path("build/bench")
STREAMS, STREAM_IN, STREAM_OUT, PROMPT = 32, 256, 128, 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Form(NamedTuple):
    """How weights are held, and in how many bits activations meet integers."""

    name: str
    quantization: Quantization
    activation_bits: int = 16

    @property
    def flags(self) -> tuple[str, ...]:
        bits = str(self.activation_bits)
        return "--quantization", self.quantization, "--activation-bits", bits

    def config(self, model: str) -> EngineConfig:
        return EngineConfig(
            model=model, quantization=self.quantization, activation_bits=self.activation_bits
        )


FORMS = (
    Form("bf16", "none"),
    Form("4-bit", "auto"),  # the file's own
    Form("4-bit, 8-bit activations", "auto", 8),
)
MORE_FORMS = (Form("8-bit", "int8"), Form("8-bit, 8-bit activations", "int8", 8))


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
    parser.add_argument(
        "--plot", type=Path, default=OUT / "roofline.png", metavar="FILE",
        help=f"the roofline (default: {OUT}/roofline.png)",
    )  # fmt: skip
    parser.add_argument(
        "--full", action="store_true",
        help=f"more rounds, 8-bit weights, a context of 8000, and the shape {LARGER}",
    )  # fmt: skip
    args = parser.parse_args()

    end_cleanly_on_sigterm()
    warn_if_busy()
    limits = measure_limits()
    print(limits.describe(), file=sys.stderr, flush=True)
    figures = []
    for figure in measure(limits, is_full=args.full):  # each is said as soon as it is known
        print(f"{figure.what}: {figure.value:.3g} {figure.unit}", file=sys.stderr, flush=True)
        figures.append(figure)
    studies = []
    for found in curves(limits, is_full=args.full):
        study.show(found)
        studies.append(found)
    report(limits, figures)
    draw(args.plot, limits, studies)
    if args.json:
        document = {
            "limits": asdict(limits),
            "figures": [asdict(figure) for figure in figures],
            "steps": [study.as_json(found) for found in studies],
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")


def measure(limits: MachineLimits, *, is_full: bool) -> Iterator[Figure]:
    rounds = 5 if is_full else 2
    yield from start_up(rounds)
    yield step_overhead()
    for form in forms(is_full=is_full):
        name, work = form.name, ModelWork.of_files(form.config(MODEL))
        with serving(MODEL, *form.flags) as server:
            if form.quantization == "none":
                yield idle(server)
            beside = server.memory().total_bytes - work.weight_bytes
            yield Figure(
                f"memory beside weights, {name}", beside / 1e6, "MB",
                note="both processes, KV cache untouched; target 200 MB",
            )  # fmt: skip
            yield single_stream(server.url, name, work, limits, rounds)
            yield prefill(server.url, name, work, limits, rounds)
            yield from streams(server.url, name, work, limits, rounds, is_full=is_full)


def forms(*, is_full: bool) -> tuple[Form, ...]:
    return FORMS + MORE_FORMS if is_full else FORMS


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """A server of ours that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli", "serve", *flags, "--port", str(port)]
    try:
        server = Server.start(command, port=port, log=OUT / "server.log", ready="/ready")
    except NotReady as error:
        sys.exit(f"{' '.join(command)}: {error}")
    with server:
        yield server


def start_up(rounds: int) -> list[Figure]:
    def seconds(*flags: str) -> float:
        times = []
        for _ in range(rounds + 1):
            with serving(*flags) as server:
                times.append(server.ready_s)
        return statistics.median(times)

    return [
        Figure("start to ready", seconds(MODEL), "s", note="target 2 s"),
        Figure("start to ready, simulator", seconds("--device", "sim"), "s", note="target 1 s"),
    ]


def step_overhead() -> Figure:
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--json", "--sequences", "64"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    [row] = json.loads(done.stdout)
    return Figure("Python per step, 64 sequences", row["total_us"], "µs", note="target 200 µs")


def idle(server: Server) -> Figure:
    """CPU of the server and its core while nothing happens."""
    before = server.cpu_s()
    time.sleep(IDLE_S)
    used = server.cpu_s() - before
    return Figure("idle", 100 * used / IDLE_S, "% of a core", note="target below 1 %")


def single_stream(
    url: str, name: str, work: ModelWork, limits: MachineLimits, rounds: int
) -> Figure:
    runs = [
        bench(url, prompts=2, concurrency=1, input_len=32, output_len=128) for _ in range(rounds)
    ]
    seconds = statistics.median(run["p50_tpot_ms"] for run in runs) / 1e3
    step = WorkStep.decode(1, 32 + 64)
    return Figure(
        f"one stream, {name}", 1 / seconds, "tok/s",
        work.best_s(step, limits) / seconds, f"of {work.bound(step, limits)}",
    )  # fmt: skip


def prefill(url: str, name: str, work: ModelWork, limits: MachineLimits, rounds: int) -> Figure:
    runs = [
        bench(url, prompts=3, concurrency=1, input_len=PROMPT, output_len=2) for _ in range(rounds)
    ]
    seconds = statistics.median(run["p50_ttft_ms"] for run in runs) / 1e3
    step = WorkStep.prefill(PROMPT)
    return Figure(
        f"prompt of {PROMPT}, {name}", PROMPT / seconds, "tok/s",
        work.best_s(step, limits) / seconds, f"of {work.bound(step, limits)}",
    )  # fmt: skip


def streams(
    url: str, name: str, work: ModelWork, limits: MachineLimits, rounds: int, *, is_full: bool
) -> list[Figure]:
    count = STREAMS * (2 if is_full else 1)
    runs = [
        bench(url, prompts=count, concurrency=STREAMS, input_len=STREAM_IN, output_len=STREAM_OUT)
        for _ in range(rounds)
    ]
    rate = statistics.median(run["output_throughput"] for run in runs)
    per_token_ms = statistics.median(run["p50_tpot_ms"] for run in runs)
    best = batch_best(
        work, limits, count=STREAMS, at_once=STREAMS, input_len=STREAM_IN, output_len=STREAM_OUT
    )
    what = f"{STREAMS} streams, {STREAM_IN} in, {STREAM_OUT} out, {name}"
    best_rate = STREAMS * STREAM_OUT / best.seconds
    return [
        Figure(what, rate, "tok/s", rate / best_rate, "of prompts and steps, each at its limit"),
        Figure("the same, per token and stream", per_token_ms, "ms"),
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


def curves(limits: MachineLimits, *, is_full: bool) -> Iterator[StepStudy]:
    """Single steps of the engine in this process: what one sequence more costs."""
    sizes = study.StudySizes(
        batch_sizes=BATCHES,
        context_len=128 if is_full else 64,
        prompt_len=PROMPT,
        long_context_len=8000 if is_full else None,
        num_steps=20 if is_full else 8,
    )
    for form in forms(is_full=is_full):
        config = _roomy(form.config(MODEL), sizes)
        print(f"steps, {form.name} ...", file=sys.stderr, flush=True)
        yield study.measure(config, sizes, name="SmolLM2-135M", limits=limits)
    if is_full:
        for quantization in ("none", "int4"):
            print(f"steps, shape {LARGER}, {quantization} ...", file=sys.stderr, flush=True)
            yield larger(quantization, sizes, limits)


def larger(quantization: Quantization, sizes: StudySizes, limits: MachineLimits) -> StepStudy:
    """Random weights."""
    with tempfile.TemporaryDirectory(prefix="octavo-shape-") as folder:
        write_shape(LARGER, Path(folder))
        config = EngineConfig(model=folder, load_format="dummy", quantization=quantization)
        return study.measure(_roomy(config, sizes), sizes, name=LARGER, limits=limits)


def draw(path: Path, limits: MachineLimits, studies: list[StepStudy]) -> None:
    from octavo_engine.errors import ConfigError

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        roofline.draw(path, limits, [study.series(found) for found in studies])
    except ConfigError as error:  # figures are worth as much without a picture
        print(f"no roofline: {error}", file=sys.stderr)
        return
    print(f"roofline: {path}")


def report(limits: MachineLimits, figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "value", "unit", "of limit", "", title=limits.describe())
    for f in figures:
        share = "" if f.of_limit is None else f"{100 * f.of_limit:.0f} %"
        table.add_row(f.what, f"{f.value:.3g}", f.unit, share, f.note)
    Console().print(table)


def _roomy(config: EngineConfig, sizes: StudySizes) -> EngineConfig:
    return study.roomy(config.replace(kv_cache_memory_bytes=1 << 30), sizes)


if __name__ == "__main__":
    main()
