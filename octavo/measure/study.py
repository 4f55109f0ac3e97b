"""A model's steps beside the machine's limits: batches that decode, a prompt, a long context."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.measure.limits import limits_for
from octavo.measure.steal_time import StealTime, describe
from octavo.measure.steps import WARM_UP_STEPS, Stepper
from octavo.measure.work import ModelWork
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo.measure.machine_limits import MachineLimits
    from octavo.measure.steps import Timed
    from octavo_engine.config import EngineConfig

ROUNDS = 3  # of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySizes:
    """What to measure."""

    batch_sizes: tuple[int, ...]
    context_len: int
    prompt_len: int
    long_context_len: int | None
    num_steps: int


@dataclass(frozen=True, slots=True)
class StudyLine:
    """One measured step."""

    what: str
    seconds: float
    num_tokens: int
    best_s: float  # what the machine would allow
    bound: str  # by which of its limits
    of_bandwidth: float  # how much of the machine's it reads with
    of_peak: float | None  # how much of the machine's it multiplies with; None: not known
    intensity: float  # FLOP a byte
    gflop_s: float

    @property
    def of_limit(self) -> float:
        return self.best_s / self.seconds


@dataclass(frozen=True, slots=True)
class StepStudy:
    """One model's figures."""

    name: str
    form: str  # of its weights, and of activations in fewer bits
    multiplied_in: str
    backend: str
    limits: MachineLimits
    weight_bytes: float
    own_bytes: int  # memory of this process beside weights and KV cache
    load_s: float
    decode: tuple[StudyLine, ...]  # by batch size
    prompt: StudyLine
    long_context: StudyLine | None
    stolen: float | None  # of the processor time meanwhile, by the host; None: not counted


class Series(NamedTuple):
    """Points under a roof, and which roof: a dtype of the limits."""

    name: str
    peak: str
    points: tuple[tuple[str, float, float], ...]  # label, FLOP a byte, GFLOP/s


def measure(
    config: EngineConfig,
    sizes: StudySizes,
    *,
    name: str | None = None,
    limits: MachineLimits | None = None,
) -> StepStudy:
    """Loads the model, and measures the limits unless they are given. Raises as the engine does."""
    from octavo_engine.core.build import build_engine
    from octavo_engine.core.device_choice import settle_device

    config = settle_device(config)
    if limits is None:
        limits = limits_for(config)
        if limits is None:
            raise ConfigError(
                f"--device {config.device}: steps are measured on auto, cpu and cuda, "
                "whose limits can be measured beside them"
            )
        print(limits.describe(), file=sys.stderr, flush=True)
    stolen, rss_before = StealTime(), _rss_bytes()
    started_at = time.perf_counter()
    engine, info = build_engine(config)
    load_s = time.perf_counter() - started_at
    try:
        work = ModelWork.of_engine(config, info, limits)
        stepper = Stepper(engine, info, seed=config.seed)
        # First the prompt: it touches all the memory that a step works in.
        prompt = _line("prompt", stepper.prefill(sizes.prompt_len, ROUNDS), work, limits)
        decode = []
        for count in sizes.batch_sizes:
            timed = stepper.decode(count, sizes.context_len, sizes.num_steps)
            decode.append(_line(f"decode {count}", timed, work, limits))
        long_context = None
        if sizes.long_context_len is not None:
            timed = stepper.decode(1, sizes.long_context_len, sizes.num_steps)
            long_context = _line(f"decode 1 at {sizes.long_context_len}", timed, work, limits)
        used = max(sizes.batch_sizes[-1] * (sizes.context_len + WARM_UP_STEPS), sizes.prompt_len)
        used = max(used, sizes.long_context_len or 0)
        own = _rss_bytes() - rss_before
        if config.device != "cuda":  # where both lie on the device
            own -= int(work.weight_bytes + min(used * work.kv_bytes_per_token, info.kv_bytes))
    finally:
        engine.close()
    in_8_bits = ", 8-bit activations" if config.activation_bits == 8 else ""
    return StepStudy(
        name or info.names[0],
        work.form + in_8_bits,
        work.held.multiplied_in,
        info.backend,
        limits,
        work.weight_bytes,
        max(0, own),
        load_s,
        tuple(decode),
        prompt,
        long_context,
        stolen.share(),
    )


def roomy(config: EngineConfig, sizes: StudySizes) -> EngineConfig:
    """With room for the largest batch, and for the prompt in one step: the limit is one step's.

    Nothing is refused: what waits is measured as well.
    """
    scheduler = config.scheduler
    most = max(sizes.batch_sizes[-1], scheduler.max_num_seqs)
    longest = max(sizes.prompt_len, scheduler.max_num_batched_tokens)
    return config.replace(
        scheduler=replace(
            scheduler,
            max_num_seqs=most,
            max_num_batched_tokens=longest,
            max_step_ms=60e3,
            queue_timeout_s=math.inf,
        )
    )


def show(study: StepStudy) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{study.name}, {study.form}, {study.backend}: {study.limits.describe()}"
    peak = f"of {study.multiplied_in} peak"
    table = Table("step", "ms", "tok/s", "of bandwidth", peak, "one sequence more", title=title)
    for column in table.columns[1:5]:
        column.justify = "right"
    before: StudyLine | None = None
    for line in (*study.decode, study.prompt, study.long_context):
        if line is None:
            continue
        is_curve = line in study.decode
        extra = "" if before is None or not is_curve else f"{_more_ms(before, line):+.2f} ms"
        before = line
        table.add_row(
            line.what,
            f"{line.seconds * 1e3:.4g}",
            f"{line.num_tokens / line.seconds:.4g}",
            f"{100 * line.of_bandwidth:.0f} %",
            "" if line.of_peak is None else f"{100 * line.of_peak:.0f} %",
            extra,
        )
    Console().print(table)
    print(
        f"weights {study.weight_bytes / 1e6:,.0f} MB, loaded in {study.load_s:.2f} s; "
        f"other memory of this process {study.own_bytes / 1e6:,.0f} MB"
    )
    if taken := describe(study.stolen):
        print(taken)


def as_json(study: StepStudy) -> dict[str, Any]:
    """The figures by name; `of_limit` with each."""
    document = asdict(study)
    for key in ("decode", "prompt", "long_context"):
        lines = document[key]
        for line in lines if isinstance(lines, (list, tuple)) else [lines]:
            if line is not None:
                line["of_limit"] = line["best_s"] / line["seconds"]
    return document


def series(study: StepStudy) -> Series:
    lines = (*study.decode, study.prompt)
    points = tuple((line.what, line.intensity, line.gflop_s) for line in lines)
    return Series(f"{study.name}, {study.form}", study.multiplied_in, points)


def _line(what: str, timed: Timed, work: ModelWork, limits: MachineLimits) -> StudyLine:
    flop = work.num_flop(timed.step)
    has_peak = work.held.multiplied_in in limits.gemm_gflop_s
    return StudyLine(
        what,
        timed.seconds,
        timed.step.num_tokens,
        work.best_s(timed.step, limits),
        work.bound(timed.step, limits),
        work.reading_s(timed.step, limits) / timed.seconds,
        work.multiplying_s(timed.step, limits) / timed.seconds if has_peak else None,
        flop / work.num_bytes(timed.step),
        flop / timed.seconds / 1e9,
    )


def _more_ms(before: StudyLine, line: StudyLine) -> float:
    more = line.num_tokens - before.num_tokens
    return (line.seconds - before.seconds) / more * 1e3


def _rss_bytes() -> int:
    """Of this process, without files that are only mapped: those go when memory is short."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
