"""Durations and quantities as Kubernetes writes them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from octavo_operator.objects.quantities import (
    parse_count,
    parse_duration,
    parse_quantity,
    plain,
    whole,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("500ms", 0.5), ("1.5h", 5400.0), ("0s", 0)],
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "5 m", "-5s", "1d", "5m ", "m5", "1e3s", "٣s"])
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="such as 90s, 5m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4), (4, 4), ("500m", "0.5"), ("8Gi", 8 * 2**30), ("1.5Gi", 3 * 2**29), ("2k", 2000),
        ("1e3", 1000), ("100n", "0.0000001"), ("1E", 10**18), ("1Ei", 2**60), ("12E2", 1200),
    ],
)  # fmt: skip
def test_quantities(text: str | int, number: str | int):
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "8GB", "-1", "1 Gi", "Gi", ".5", "0x10", "1e", "inf", "٣"])
def test_what_is_no_quantity(text: str):
    with pytest.raises(ValueError, match="such as 4, 500m or 8Gi"):
        parse_quantity(text)


def test_half_a_core_still_needs_a_thread():
    assert whole(parse_quantity("500m")) == 1
    assert whole(parse_quantity("1500m")) == 2
    assert whole(parse_quantity("2")) == 2


def test_shares_are_rounded_as_asked():
    assert parse_count("25%", 10, round_up=True) == 3
    assert parse_count("25%", 10, round_up=False) == 2
    assert parse_count(7, 10, round_up=True) == 7


def test_the_same_number_is_the_same_text():
    assert [str(plain(number)) for number in (300.0, 0.5)] == ["300", "0.5"]
