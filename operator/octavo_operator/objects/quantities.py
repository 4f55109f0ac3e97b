"""Durations, quantities and counts as Kubernetes writes them, read into seconds and numbers."""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, Decimal

_DURATION = re.compile(r"(?:[0-9]{1,6}(?:\.[0-9]{1,6})?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}

_QUANTITY = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([munkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `1m30s`, `500ms`. Raises ValueError."""
    if not _DURATION.fullmatch(text):
        raise ValueError("must be a duration such as 90s, 5m or 1h30m")
    parts = _DURATION_PART.findall(text)
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))


def parse_quantity(value: str | int) -> Decimal:
    """The number behind `4`, `500m`, `8Gi`, `1e3`. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError("must be a quantity such as 4, 500m or 8Gi")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    if suffix in _BINARY:
        return number * Decimal(1024 ** _BINARY[suffix])
    return number.scaleb(int(suffix[1:])) if suffix else number


def whole(value: Decimal) -> int:
    """Rounded up: half a core still needs a thread."""
    return int(value.to_integral_value(rounding=ROUND_CEILING))


def parse_count(value: str | int, total: int, *, round_up: bool) -> int:
    """`2` or `25%` of `total`, as a rolling update rounds them."""
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%")) * total / 100
    return math.ceil(share) if round_up else math.floor(share)


def plain(number: float) -> int | float:
    """Without a fraction that is not there, so that 300 and 300.0 make the same text."""
    return int(number) if number.is_integer() else number
