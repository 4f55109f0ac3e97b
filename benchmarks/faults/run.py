"""All scenarios of load, hostile input and faults, and a table of the figures that they must keep.

    python -m benchmarks.faults.run [--counts-only] [--json FILE] [SCENARIO...]

overload         three times what engines can do, from clients that do not wait
hostile bodies   what others notice of bodies that are costly to read, and the memory that is left
slow readers     two thousand clients that read ten bytes a second of their streams
tenants          two of them want more than there is, one ten times as much
kills            engines with a real model are killed under a hundred live requests
rolling          engines and routers are replaced one after the other under load
poison requests  requests that engines die of cost two engines at most
drains           engines and routers that are ended lose no answer
router workers   they are replaced, and end with their parent

Mostly simulated engines, real processes; about fifteen minutes on two cores that do nothing else.
The bounds are in `bounds.json`. Ends with status 1 where one is not kept or a scenario could not be
run. With `--counts-only` only scenarios run that count what was lost, which means the same on a
busy machine: about five minutes. The last table is theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as Xml

from benchmarks import hostile
from benchmarks.faults import drains, kills
from benchmarks.faults.bounds import bounds_of, judge
from benchmarks.router import impatient_clients, slow_readers, tenants
from benchmarks.router.overload import Verdict
from benchmarks.servers import end_cleanly_on_sigterm, warn_if_busy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# All of them: `python -m benchmarks.router.impatient_clients`.
_OVERLOADS: Final[tuple[tuple[impatient_clients.Story, bool], ...]] = (
    ("deadline", False), ("leave", False), ("leave", True), ("streams", True),
)  # fmt: skip
_HOSTILE_S: Final = 3.0  # of each kind
_TENANTS_S: Final = 20.0  # each of two parts
_ROLLING_MINUTES: Final = 1.5
_TESTS_S: Final = 240.0
_POISON: Final = (
    "tests/router/proxy/test_quarantine.py",
    "tests/router/proxy/test_single_engine_pool.py",
)
_DRAINS: Final = (
    "tests/router/test_with_engines.py::test_an_engine_that_must_go_loses_nothing",
    "tests/router/test_with_engines.py::test_sigterm_of_the_router_ends_no_stream",
    "tests/router/test_server.py::test_it_drains_readiness_first_then_what_is_under_way_then_itself",
    "tests/engine/server/test_process.py::test_a_signal_drains_finishes_and_exits_with_0",
)
_WORKERS: Final = ("tests/router/test_workers.py",)


@dataclass(frozen=True, slots=True)
class Row:
    """Of the table."""

    scenario: str
    figure: str
    seen: str
    bound: str
    is_kept: bool


def rows_of(scenario: str, verdict: Verdict) -> Iterator[Row]:
    """Each bound, and what else the scenario complained of."""
    of_bounds = set()
    for bound in bounds_of(scenario):
        seen = verdict.seen.get(bound.figure)
        shown = "not measured" if seen is None else f"{seen:.3g}"
        of_bounds.add(bound.complaint(verdict))
        yield Row(verdict.story, bound.figure, shown, str(bound), bound.holds(verdict))
    for complaint in verdict.complaints:
        if complaint not in of_bounds:
            yield Row(verdict.story, complaint, "", "", False)


def show(rows: Sequence[Row]) -> None:
    head = Row("scenario", "figure", "seen", "bound", True)
    widths = [max(len(getattr(row, name)) for row in (head, *rows))
              for name in ("scenario", "figure", "seen", "bound")]  # fmt: skip
    for row in (head, *rows):
        cells = zip((row.scenario, row.figure, row.seen, row.bound), widths, strict=True)
        last = "" if row is head else "ok" if row.is_kept else "NOT KEPT"
        print("  ".join(text.ljust(width) for text, width in cells), last, sep="  ")


# -- scenarios -------------------------------------------------------------------------------------


def overload() -> Iterator[Verdict]:
    for story, has_router in _OVERLOADS:
        yield impatient_clients.run(story, impatient_clients.QUICK, has_router=has_router)


def hostile_bodies() -> Iterator[Verdict]:
    os.environ["OCTAVO_DEVICE"] = "sim"
    try:
        found = hostile.measure("demo://smollm2", _HOSTILE_S, 1.0, "")
    finally:
        del os.environ["OCTAVO_DEVICE"]
    hostile.show(found)
    quiet = found["quiet"]["p99_s"]
    ratios = {name: kind["p99_s"] / quiet for name, kind in found["kinds"].items()}
    memory = found["memory"]
    verdict = Verdict("hostile bodies", {
        **{f"others' p99 beside {name}, times quiet": ratio for name, ratio in ratios.items()},
        "others' p99, times quiet": max(ratios.values()),
        "memory afterwards, of before": memory["after"] / memory["before"],
    })  # fmt: skip
    judge("hostile bodies", verdict)
    yield verdict


def readers() -> Iterator[Verdict]:
    for place in slow_readers.PLACES:
        yield slow_readers.run(place, slow_readers.FULL)


def tests(name: str, *paths: str) -> Iterator[Verdict]:
    """Promises that tests keep with real parts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *paths]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TESTS_S, check=False
        )
        verdict = Verdict(name)
        if report.exists():
            cases = list(Xml.parse(report).iter("testcase"))
            failed = [case for case in cases if _has(case, "failure", "error")]
            skipped = [case for case in cases if _has(case, "skipped")]
            verdict.seen = {
                "tests that ran": len(cases) - len(skipped),
                "tests that failed": len(failed),
            }
            verdict.board = {name: (len(cases) - len(skipped), len(failed))}
            for case in failed:
                verdict.expect(False, f"failed: {case.get('classname')}::{case.get('name')}")
        elif done.returncode:
            verdict.expect(False, f"pytest ended with {done.returncode}: {done.stdout[-300:]}")
    judge(name, verdict)
    yield verdict


def _has(case: Xml.Element, *names: str) -> bool:
    return any(case.find(name) is not None for name in names)


SCENARIOS: Final[dict[str, Callable[[], Iterator[Verdict]]]] = {
    "overload": overload,
    "hostile bodies": hostile_bodies,
    "slow readers": readers,
    "tenants": lambda: (tenants.run(weight, _TENANTS_S) for weight in (1.0, 3.0)),
    "kills": lambda: iter([kills.run(kills.Setup())]),
    "rolling": lambda: iter([drains.run(_ROLLING_MINUTES)]),
    "poison requests": lambda: tests("poison requests", *_POISON),
    "drains": lambda: tests("drains", *_DRAINS),
    "router workers": lambda: tests("router workers", *_WORKERS),
}


COUNTS: Final = ("kills", "rolling", "poison requests", "drains", "router workers")


def show_board(verdicts: Sequence[Verdict]) -> None:
    """What was tried, and what of it was lost."""
    cases = [
        (f"{verdict.story}: {case}" if case != verdict.story else case, tried, lost)
        for verdict in verdicts
        for case, (tried, lost) in verdict.board.items()
    ]
    width = max((len(case) for case, _, _ in cases), default=0)
    print(f"\n{'case':{width}}  {'tried':>8}  {'survived':>8}  {'lost':>8}")
    for case, tried, lost in cases:
        print(f"{case:{width}}  {tried:8}  {tried - lost:8}  {lost:8}")


def run(scenario: str) -> tuple[list[Verdict], list[Row]]:
    """What was seen, as far as it came."""
    verdicts: list[Verdict] = []
    rows: list[Row] = []
    began_at = time.monotonic()
    try:
        for verdict in SCENARIOS[scenario]():
            verdict.show()
            verdicts.append(verdict)
            rows += rows_of(scenario, verdict)
    except (Exception, SystemExit) as error:  # the other scenarios are still worth running
        rows.append(Row(scenario, f"could not be run: {error!r}"[:120], "", "", False))
    print(f"  {scenario} took {time.monotonic() - began_at:.0f} s", flush=True)
    return verdicts, rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")
    parser.add_argument(
        "--counts-only", action="store_true", help="none that needs an idle machine"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was seen there as well")
    args = parser.parse_args(arguments)
    if unknown := set(args.scenarios) - SCENARIOS.keys():
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    end_cleanly_on_sigterm()
    if not args.counts_only:
        warn_if_busy()
    began_at = time.monotonic()
    verdicts: list[Verdict] = []
    rows: list[Row] = []
    for scenario in args.scenarios or (COUNTS if args.counts_only else SCENARIOS):
        seen, found = run(scenario)
        verdicts += seen
        rows += found
    print()
    show(rows)
    show_board(verdicts)
    num_failed = sum(not row.is_kept for row in rows)
    print(f"\n{len(rows)} figures, {num_failed} not kept, {time.monotonic() - began_at:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in verdicts], indent=2) + "\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
