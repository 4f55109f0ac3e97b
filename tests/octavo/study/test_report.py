"""Results side by side: the table, the picture, and the promise that is checked against them."""

import builtins
import dataclasses
from array import array

import pytest

from octavo import plotting
from octavo.study import plot, report
from octavo.study.engine_models import engine_models
from octavo.study.figures import RequestOutcome, StudyTally
from octavo.study.judgement import judge_random, judge_sharing
from octavo.study.simulation import Setup
from octavo.study.synthetic import synthetic
from octavo_engine.errors import ConfigError


def make_figures(policy="prefix-load", **changes):
    tally = StudyTally()
    for number in range(101):
        tally.gaps.append(0.01)
        tally.add(
            RequestOutcome(
                arrived_at=number,
                first_at=number + 0.001 * number,
                last_at=number + 0.5,
                num_prompt_tokens=100,
                num_output_tokens=2,
                num_cached_tokens=48,
                num_predicted_tokens=32 if number < 100 else 31,
            )
        )
    figures = tally.figures(
        policy, requests=[60, 41], busy_s=[20.0, 10.0], num_prefilled_tokens=5252,
        num_preemptions=0,
    )  # fmt: skip
    return dataclasses.replace(figures, **changes)


def test_figures_are_sums_ranks_and_shares():
    figures = make_figures()

    assert figures.num_requests == 101
    assert figures.hit_rate == pytest.approx(0.48)
    assert figures.ttft_p50_s == pytest.approx(0.05)
    assert figures.ttft_p99_s == pytest.approx(0.099)
    assert figures.makespan_s == pytest.approx(100.5)
    assert figures.utilisation == pytest.approx(30 / 201)
    assert figures.imbalance == pytest.approx(60 / 50.5)
    assert figures.work_imbalance == pytest.approx(4 / 3)
    assert figures.predicted_within_block == pytest.approx(100 / 101)


def test_nothing_answered_is_no_division_by_zero():
    figures = StudyTally(num_refused=3).figures(
        "random", requests=[0, 0], busy_s=[0.0, 0.0], num_prefilled_tokens=0, num_preemptions=0
    )
    assert (figures.num_requests, figures.num_refused, figures.imbalance) == (0, 3, 1.0)


def test_the_table_is_aligned_markdown():
    lines = report.table([make_figures(), make_figures("round-robin")]).split("\n")

    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("| policy      | hit rate |")
    assert lines[2].startswith("| prefix-load |    48.0% |     5,252 |     50.0 |")
    assert len(lines) == 4


def test_json_says_what_was_run():
    setup = Setup(model=engine_models()["gpu-8b"], num_engines=2)
    value = report.as_json(synthetic("random", 20), setup, [make_figures()])

    assert (value["workload"], value["num_requests"], value["num_engines"]) == ("random", 20, 2)
    assert value["policies"][0]["hit_rate"] == pytest.approx(0.48)


def test_the_promise_is_kept_or_named():
    mine = make_figures()
    worse = make_figures("least-load", ttft_p50_s=0.1, ttft_p99_s=0.2, num_prefilled_tokens=9000)
    assert all(finding.is_met for finding in judge_sharing("w", [mine, worse]))
    assert len(judge_sharing("w", [mine, worse, make_figures("random")])) == 3

    equal = judge_sharing("w", [mine, make_figures("round-robin")])
    assert [finding.is_met for finding in equal] == [False, False, False]
    assert str(equal[0]) == "MISSED: w, ttft_p50_s: 1.000 x round-robin"


def test_two_percent_behind_the_best_is_the_limit():
    mine = make_figures()
    near = make_figures("random", ttft_p99_s=mine.ttft_p99_s * 0.985)
    far = make_figures("power-of-two", output_tokens_per_s=mine.output_tokens_per_s * 1.03)

    assert all(finding.is_met for finding in judge_random("w", [mine, near]))
    missed = [f for f in judge_random("w", [mine, near, far]) if not f.is_met]
    assert [(f.figure, f.other) for f in missed] == [("output_tokens_per_s", "power-of-two")]


def test_a_picture_needs_matplotlib_and_a_name_that_says_what_it_is(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--plot must end in \.png, \.svg, \.pdf; got x\.gif"):
        plotting.require(tmp_path / "x.gif")

    true_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="--plot needs matplotlib: pip install matplotlib"):
        plotting.require(tmp_path / "x.png")


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "study.png"
    plot.draw(path, [("one", [make_figures(), make_figures("random")]), ("two", [make_figures()])])

    assert path.read_bytes().startswith(b"\x89PNG")


def test_gaps_are_kept_as_plain_numbers():
    assert isinstance(StudyTally().gaps, array)  # a million of them are eight megabytes
