"""Two things that had to be equal and are not, told so that a person can see where."""

from __future__ import annotations

from typing import Any


class Difference(AssertionError):
    """What was asked, of whom, and the first thing that differs."""


def first_difference(got: Any, truth: Any, at: str = "") -> str:
    """Empty if there is none."""
    if got == truth:
        return ""
    if isinstance(got, dict) and isinstance(truth, dict):
        for name in [*truth, *(name for name in got if name not in truth)]:
            if got.get(name) != truth.get(name):
                return first_difference(got.get(name), truth.get(name), f"{at}.{name}")
    if isinstance(got, list) and isinstance(truth, list) and len(got) == len(truth):
        for index, (mine, other) in enumerate(zip(got, truth, strict=True)):
            if mine != other:
                return first_difference(mine, other, f"{at}[{index}]")
    return f"{at} is {got!r:.1000}, not {truth!r:.1000}"
