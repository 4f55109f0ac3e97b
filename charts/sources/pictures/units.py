"""Numbers as a dashboard shows them: three digits and a unit that fits."""

from __future__ import annotations

import math

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}
_COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SUFFIXES = {"reqps": " req/s", "ops": " ops/s", "tokens/s": " tokens/s", "h": " h"}


def formatted(value: float, unit: str) -> str:
    """Of Grafana's units, those that our dashboards use; others as they are."""
    if not math.isfinite(value):
        return "no data"
    if unit == "percentunit":
        return f"{_digits(100 * value)}%"
    if scales := _SCALES.get(unit):
        factor, name = _scale(value, scales)
        return f"{_digits(value / factor)} {name}" if value else f"0 {scales[-2][1]}"
    factor, name = _scale(value, _COUNTS)
    suffix = _SUFFIXES.get(unit, "" if unit == "short" else f" {unit}")
    return f"{_digits(value / factor)}{' ' * bool(name)}{name}{suffix}"


def _scale(value: float, scales: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    return next((each for each in scales if abs(value) >= each[0]), scales[-1])


def _digits(value: float) -> str:
    """Three of them, without zeros at the end."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
