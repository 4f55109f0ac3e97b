"""The shipped alert rules at another pace, so that a day of burnt budget fits into a test.

Every duration of a rule is divided by one factor: windows of rates, offsets, and how long it must
hold. Ages that an expression compares with (seconds since something was heard) have a factor of
their own, since what they measure does not go faster: heartbeats are a second apart in any test.
Everything else, limits and labels and arithmetic, stays as it is.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION = re.compile(r"(\d+)(ms|[smhdw])")
_RANGE = re.compile(r"\[(\w+)\]")
_OFFSET = re.compile(r"\boffset (\w+)")
_AGE = re.compile(r"(_age_seconds\)? > )(\d+(?:\.\d+)?)")


def hurried(
    rules: dict[str, Any], *, windows: int, ages: int, every: str | None = None
) -> dict[str, Any]:
    """A rule file that fires so many times sooner, evaluated `every` so often."""
    groups = []
    for group in rules["groups"]:
        more = {} if every is None else {"interval": every}
        made = [_rule(rule, windows, ages) for rule in group["rules"]]
        groups.append({**group, **more, "rules": made})
    return {**rules, "groups": groups}


def _rule(rule: dict[str, Any], windows: int, ages: int) -> dict[str, Any]:
    made = {**rule, "expr": hurried_expr(rule["expr"], windows=windows, ages=ages)}
    if "for" in rule:
        made["for"] = shorter(rule["for"], windows)
    return made


def hurried_expr(expr: str, *, windows: int, ages: int) -> str:
    expr = _RANGE.sub(lambda found: f"[{shorter(found[1], windows)}]", expr)
    expr = _OFFSET.sub(lambda found: f"offset {shorter(found[1], windows)}", expr)
    return _AGE.sub(lambda found: f"{found[1]}{float(found[2]) / ages:g}", expr)


def shorter(duration: str, factor: int) -> str:
    """In whole milliseconds; a duration that would not be is an error, not a rounded one."""
    parts = _DURATION.findall(duration)
    if not parts or "".join(map("".join, parts)) != duration:
        raise ValueError(f"{duration!r} is no duration of Prometheus")
    left = Fraction(sum(int(number) * _UNITS_MS[unit] for number, unit in parts), factor)
    if left.denominator != 1 or not left:
        raise ValueError(f"{duration} / {factor} is no whole number of milliseconds")
    return f"{left}ms"
