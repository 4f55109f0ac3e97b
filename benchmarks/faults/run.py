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

Mostly simulated engines, real processes; ten minutes on two cores that do nothing else. The bounds
are in `bounds.json`. Ends with status 1 where one is not kept or a scenario could not be run. From
the kills on, scenarios count what was lost, which means the same on a busy machine: these run side
by side, and with `--counts-only` no others do. The last table is theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
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
_OVERLOADED: Final = replace(impatient_clients.QUICK, overload_s=20.0)
_READERS: Final = replace(slow_readers.FULL, write_timeout_s=30.0)
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
        yield impatient_clients.run(story, _OVERLOADED, has_router=has_router)


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
        yield slow_readers.run(place, _READERS)


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


# They wait more than they compute, so each of these runs beside the others.
LANES: Final = (("kills",), ("rolling",), ("poison requests", "drains", "router workers"))
COUNTS: Final = tuple(scenario for lane in LANES for scenario in lane)


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


def _alone(*, is_any: bool) -> list[str]:
    """Scenarios that measure times, and so need the machine for themselves."""
    return [scenario for scenario in SCENARIOS if is_any and scenario not in COUNTS]


def run_side_by_side(lanes: Sequence[Sequence[str]]) -> tuple[list[Verdict], list[Row]]:
    """Each lane in a process of its own, which ends with this one."""
    verdicts: list[Verdict] = []
    rows: list[Row] = []
    began_at = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = [_start(stack, lane, folder / str(which)) for which, lane in enumerate(lanes)]
        for lane, (process, file) in zip(lanes, started, strict=True):
            process.wait()
            if not file.exists():
                said = file.with_suffix(".log").read_text(errors="replace")[-300:]
                what = f"could not be run: status {process.returncode}, {said!r}"
                rows.append(Row(", ".join(lane), what, "", "", False))
                continue
            found = json.loads(file.read_text())
            verdicts += [_verdict(one) for one in found["verdicts"]]
            rows += [Row(**row) for row in found["rows"]]
    for verdict in verdicts:
        verdict.show()
    print(f"  side by side they took {time.monotonic() - began_at:.0f} s", flush=True)
    return verdicts, rows


def _start(
    stack: ExitStack, lane: Sequence[str], stem: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    file = stem.with_suffix(".json")
    log = stack.enter_context(stem.with_suffix(".log").open("wb"))
    command = [sys.executable, "-m", "benchmarks.faults.run", "--json", str(file), *lane]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process, file


def _verdict(fields: dict[str, Any]) -> Verdict:
    """As it was before it became JSON."""
    board = {case: (tried, lost) for case, (tried, lost) in fields["board"].items()}
    return Verdict(**{**fields, "board": board})


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
    if not args.counts_only:
        warn_if_busy()
    began_at = time.monotonic()
    verdicts: list[Verdict] = []
    rows: list[Row] = []
    for scenario in args.scenarios or _alone(is_any=not args.counts_only):
        seen, found = run(scenario)
        verdicts += seen
        rows += found
    if not args.scenarios:
        seen, found = run_side_by_side(LANES)
        verdicts += seen
        rows += found
    print()
    show(rows)
    show_board(verdicts)
    num_failed = sum(not row.is_kept for row in rows)
    print(f"\n{len(rows)} figures, {num_failed} not kept, {time.monotonic() - began_at:.0f} s")
    if args.json:
        parts = (("verdicts", verdicts), ("rows", rows))
        shown = {name: [asdict(one) for one in each] for name, each in parts}
        Path(args.json).write_text(json.dumps(shown, indent=2) + "\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    end_cleanly_on_sigterm()
    sys.exit(main())
