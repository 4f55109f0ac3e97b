"""The rules of a test say the same as those of the chart, only sooner."""

from __future__ import annotations

import re

import pytest
import yaml

from charts.sources import alerts
from tests.charts.hurry import hurried, hurried_expr, shorter

RULES = yaml.safe_load(alerts.render())
_TIMES = re.compile(r"\[\w+\]|offset \w+|_age_seconds\)? > \S+")


@pytest.mark.parametrize(
    ("duration", "factor", "left"),
    [("5m", 300, "1000ms"), ("1d", 300, "288000ms"), ("1h30m", 60, "90000ms"), ("20ms", 1, "20ms")],
)
def test_durations_are_divided(duration, factor, left):
    assert shorter(duration, factor) == left


@pytest.mark.parametrize("duration", ["", "5", "m", "5 m", "5m!", "5y"])
def test_what_is_no_duration_is_an_error(duration):
    with pytest.raises(ValueError, match="is no duration"):
        shorter(duration, 2)


def test_what_cannot_be_divided_is_not_rounded():
    with pytest.raises(ValueError, match="no whole number"):
        shorter("1s", 3)


def test_windows_offsets_and_ages_change_and_limits_do_not():
    before = (
        "rate(a_total[5m]) > 5 and rate(a_total[1d] offset 1h) > 0.2 "
        "and max(b_age_seconds) > 600 and b_age_seconds > 30 and c_seconds > 10"
    )
    assert hurried_expr(before, windows=300, ages=20) == (
        "rate(a_total[1000ms]) > 5 and rate(a_total[288000ms] offset 12000ms) > 0.2 "
        "and max(b_age_seconds) > 30 and b_age_seconds > 1.5 and c_seconds > 10"
    )


def test_all_rules_are_there_with_all_but_their_times():
    made = hurried(RULES, windows=300, ages=20, every="250ms")
    pairs = zip(RULES["groups"], made["groups"], strict=True)
    for old, new in pairs:
        assert new["interval"] == "250ms"
        for before, after in zip(old["rules"], new["rules"], strict=True):
            assert before.keys() == after.keys()
            assert before["labels"] == after["labels"] and before["alert"] == after["alert"]
            assert _TIMES.sub("T", before["expr"]) == _TIMES.sub("T", after["expr"])
            assert "m]" not in after["expr"].replace("ms]", "")


def test_no_time_of_any_rule_is_written_in_a_way_that_stays():
    """A range, an offset or an age in another form would keep its length unseen."""
    for alert in alerts.ALERTS:
        assert alert.expr.count("[") == len(re.findall(r"\[\d+[mhd]\]", alert.expr))
        assert alert.expr.count("offset") == len(re.findall(r"offset \d+[mhd]\b", alert.expr))
        ages = re.findall(r"_age_seconds\)? > \d+", alert.expr)
        assert alert.expr.count("_age_seconds") == len(ages), alert.expr
