"""What `make test-faults` says of figures that are kept, are not, or were not measured."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from benchmarks.faults import kills, run
from benchmarks.faults.bounds import bounds_of, judge
from benchmarks.router.overload import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

KEPT = {"others' p99, times quiet": 1.9, "memory afterwards, of before": 1.1}


@pytest.mark.parametrize("scenario", run.SCENARIOS)
def test_every_scenario_has_bounds(scenario: str):
    assert bounds_of(scenario)


def test_figures_within_their_bounds_are_kept():
    verdict = Verdict("it", dict(KEPT))
    judge("hostile bodies", verdict)
    assert not verdict.complaints
    assert all(row.is_kept for row in run.rows_of("hostile bodies", verdict))


def test_a_figure_beyond_its_bound_or_missing_is_not_kept():
    verdict = Verdict("it", {"others' p99, times quiet": 2.1})
    judge("hostile bodies", verdict)
    assert verdict.complaints == [
        "others' p99, times quiet: 2.1, must be <= 2",
        "memory afterwards, of before: not measured, must be <= 1.1",
    ]
    rows = list(run.rows_of("hostile bodies", verdict))
    assert [(row.seen, row.bound, row.is_kept) for row in rows] == [
        ("2.1", "<= 2", False), ("not measured", "<= 1.1", False),
    ]  # fmt: skip


def test_the_command_fails_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> Iterator[Verdict]:
        yield Verdict("first", dict(KEPT), ["an answer was lost"])
        raise OSError("no port is free")

    def good() -> Iterator[Verdict]:
        yield Verdict("second", dict(KEPT))

    monkeypatch.setitem(run.SCENARIOS, "hostile bodies", broken)
    assert run.main(["hostile bodies"]) == 1
    shown = capsys.readouterr().out
    assert "an answer was lost" in shown
    assert "could not be run: OSError('no port is free')" in shown
    assert "4 figures, 2 not kept" in shown
    monkeypatch.setitem(run.SCENARIOS, "hostile bodies", good)
    assert run.main(["hostile bodies"]) == 0


def test_the_scoreboard_says_what_was_tried_and_lost(capsys: pytest.CaptureFixture[str]):
    run.show_board(
        [Verdict("kills", board={"chat": (12, 1)}), Verdict("drains", board={"drains": (4, 0)})]
    )
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert rows == [
        ["case", "tried", "survived", "lost"], ["kills:", "chat", "12", "11", "1"],
        ["drains", "4", "4", "0"],
    ]  # fmt: skip
    assert set(run.COUNTS) <= set(run.SCENARIOS)


def test_tests_that_fail_or_are_not_there_are_not_kept(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    [verdict] = run.tests("router workers", str(file))
    assert verdict.seen == {"tests that ran": 2.0, "tests that failed": 1.0}
    assert any("test_bad" in complaint for complaint in verdict.complaints)
    [verdict] = run.tests("router workers", str(tmp_path / "test_gone.py"))
    assert not all(row.is_kept for row in run.rows_of("router workers", verdict))


def test_what_one_process_saw_is_what_another_one_reads():
    seen = Verdict("kills", {"lost": 1.0}, ["an answer was lost"], {"chat": (12, 1)})
    assert run._verdict(json.loads(json.dumps(asdict(seen)))) == seen


def test_a_lane_that_ends_without_a_result_is_not_kept_and_says_why():
    verdicts, [row] = run.run_side_by_side([("no such thing",)])
    assert not verdicts
    assert not row.is_kept
    assert "no such scenario" in row.figure


def test_all_that_counts_losses_runs_side_by_side_and_the_rest_alone():
    alone = run._alone(is_any=True)
    assert sorted([*alone, *run.COUNTS]) == sorted(run.SCENARIOS)
    assert not run._alone(is_any=False)


def test_kills_take_pairs_with_features_of_their_own(capsys: pytest.CaptureFixture[str]):
    assert kills._features("tiers,adapters") == ("adapters", "tiers")
    assert kills._features("none") == ()
    with pytest.raises(SystemExit):
        kills.main(["--beside", "tires"])
    assert "no such feature: tires" in capsys.readouterr().err


def test_pairs_share_the_number_of_kills():
    count = kills.KillCount(3, time.monotonic() + 60)
    taken = [count.take() for _ in range(4)]
    assert taken == [True, True, True, False]
    assert not kills.KillCount(3, time.monotonic() - 1).take()
