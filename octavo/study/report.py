"""Results side by side: a table for people, plain values for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.study.figures import Figures
    from octavo.study.simulation import Setup
    from octavo.study.workload import Workload

COLUMNS: dict[str, Callable[[Figures], str]] = {
    "policy": lambda f: f.policy,
    "hit rate": lambda f: f"{f.hit_rate:.1%}",
    "prefilled": lambda f: f"{f.num_prefilled_tokens:,}",
    "TTFT p50": lambda f: _ms(f.ttft_p50_s),
    "p90": lambda f: _ms(f.ttft_p90_s),
    "p99": lambda f: _ms(f.ttft_p99_s),
    "ITL mean": lambda f: _ms(f.itl_mean_s),
    "ITL p99": lambda f: _ms(f.itl_p99_s),
    "out tok/s": lambda f: f"{f.output_tokens_per_s:,.0f}",
    "busy": lambda f: f"{f.utilisation:.0%}",
    "requests max/mean": lambda f: f"{f.imbalance:.2f}",
    "work max/mean": lambda f: f"{f.work_imbalance:.2f}",
    "makespan s": lambda f: f"{f.makespan_s:,.1f}",
    "foreseen": lambda f: f"{f.predicted_within_block:.1%}",
    "refused": lambda f: str(f.num_refused),
    "loads": lambda f: f"{f.num_adapter_loads:,}",
}

LEGEND = (
    "Times in milliseconds. hit rate: prompt tokens found in an engine's cache; prefilled: prompt "
    "tokens computed; busy: share of the time in which engines computed; foreseen: requests of "
    "which the router knew the cached tokens to within one block; loads: of adapters."
)


def heading(workload: Workload, setup: Setup) -> str:
    load = workload.load(setup.model, setup.num_engines)
    return (
        f"{workload.name}: {len(workload.arrivals):,} requests arriving in "
        f"{workload.span_s:,.0f} s, {setup.num_engines} engines ({setup.model.name}, "
        f"{setup.model.num_kv_tokens:,} tokens of KV each), load without any cache {load:.2f}"
    )


def table(results: Sequence[Figures]) -> str:
    """In Markdown, and in line for a terminal."""
    rows = [list(COLUMNS), *([show(f) for show in COLUMNS.values()] for f in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def as_json(workload: Workload, setup: Setup, results: Sequence[Figures]) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "num_requests": len(workload.arrivals),
        "span_s": workload.span_s,
        "load": workload.load(setup.model, setup.num_engines),
        "num_engines": setup.num_engines,
        "engine_model": setup.model.name,
        "num_kv_tokens": setup.model.num_kv_tokens,
        "signal_delay_s": setup.signal_delay_s,
        "shape": setup.shape,
        "seed": setup.seed,
        "adapters": None if setup.adapters is None else asdict(setup.adapters),
        "policies": [_numbers(figures) for figures in results],
    }


def _numbers(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in asdict(figures).items() if name != "felt"}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join([first, *rest]) + " |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
