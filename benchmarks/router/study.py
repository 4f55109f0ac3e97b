"""The routing study: every policy on a trace and on made-up loads, judged and written down.

    python -m benchmarks.router.study --trace FILE      # about a quarter of an hour, on one core

Writes study.md and study.png (if matplotlib is there) beside this file. The same code
and seed give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.study import plot, report
from octavo.study.engine_models import engine_models
from octavo.study.judgement import judge_random, judge_sharing
from octavo.study.simulation import Setup, compare
from octavo.study.synthetic import SYNTHETIC, synthetic
from octavo.study.trace import read_trace
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.study.figures import Figures
    from octavo.study.judgement import PolicyFinding
    from octavo.study.workload import Workload

HERE = Path(__file__).parent
POLICIES = (
    "prefix-load",
    "least-load",
    "round-robin",
    "consistent-hash",
    "power-of-two",
    "random",
)
TRACE_LOAD = 0.8
JUDGED_AS_SHARING = ("multi-turn", "shared-system")
JUDGED_AS_RANDOM = "random"

_INTRODUCTION = """# Routing policies on simulated engines

Written by `python -m benchmarks.router.study`; `octavo bench router` runs one workload at a time.
Schedulers, KV pools, prefix caches, residency, router, index and policies are the real ones.
Modelled are the time of a step (`gpu-8b`: 6 ms, 0.1 ms for each sequence that decodes, 0.04 ms for
each prompt token, however long the context) and the network (10 ms from a step to the router's
knowing of it). There is no queue before the engines. Figures do not depend on the machine.
"""
_PROMISE = """\
What prefix-load must achieve: fewer prefilled tokens and lower TTFT than round-robin and least-load
where prompts share prefixes; at most 2 % behind the best where they do not.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--num-requests", type=int, default=800, help="of synthetic workloads")
    parser.add_argument("--trace-requests", type=int, help="default: all")
    parser.add_argument("--out", type=Path, default=HERE, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="policies at once")
    args = parser.parse_args()
    setup = Setup(model=engine_models()["gpu-8b"], seed=args.seed)
    sections, findings = [], []
    drawn: list[tuple[str, list[Figures]]] = []
    for workload, judged in _workloads(args, setup):
        results = _run(workload, setup, args.jobs)
        found = _judge(workload.name, judged, results)
        findings += found
        drawn.append((workload.name, results))
        text = f"{report.heading(workload, setup)}.\n\n{report.table(results)}\n"
        sections.append(f"## {workload.name}\n\n{text}")
        print(f"{text}\n" + "\n".join(map(str, found)), flush=True)
    verdict = _verdict(findings)
    text = "\n".join([_INTRODUCTION, verdict, *sections, report.LEGEND])
    (args.out / "study.md").write_text(text + "\n")
    try:
        plot.draw(args.out / "study.png", drawn)
    except ConfigError as error:
        print(error, file=sys.stderr)
    return 0 if all(finding.is_met for finding in findings) else 1


def _workloads(args: argparse.Namespace, setup: Setup) -> Iterator[tuple[Workload, str]]:
    def at(workload: Workload, load: float) -> Workload:
        return workload.at_load(load, setup.model, setup.num_engines)

    for path in args.trace:
        workload = read_trace(path, max_requests=args.trace_requests)
        yield at(workload, TRACE_LOAD), "sharing"
    for name in SYNTHETIC:
        judged = "random" if name == JUDGED_AS_RANDOM else ""
        judged = "sharing" if name in JUDGED_AS_SHARING else judged
        workload = synthetic(name, args.num_requests, seed=args.seed)
        yield at(workload, 0.8 if judged == "random" else 0.9), judged


def _run(workload: Workload, setup: Setup, num_jobs: int) -> list[Figures]:
    results = []
    began_at = time.perf_counter()
    for figures in compare(workload, setup, POLICIES, num_jobs=num_jobs):
        results.append(figures)
        passed_s = time.perf_counter() - began_at
        print(f"{workload.name}, {figures.policy}: {passed_s:.0f} s", flush=True)
    return results


def _judge(name: str, judged: str, results: list[Figures]) -> list[PolicyFinding]:
    match judged:
        case "sharing":
            return judge_sharing(name, results)
        case "random":
            return judge_random(name, results)
    return []


def _verdict(findings: list[PolicyFinding]) -> str:
    lines = [
        "| judged on | figure | against | better by | |",
        "|---|---|---|--:|---|",
        *(
            f"| {f.workload} | {f.figure} | {f.other} | {f.ratio:.2f} x | "
            f"{'met' if f.is_met else '**missed**'} |"
            for f in findings
        ),
    ]
    return "\n".join([_PROMISE, *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
