"""How measurements are summed up and shown: percentiles, a table, a JSON file."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles as `mean_NAME_ms`, `p99_NAME_ms`; nothing of nothing."""
    if not seconds:
        return {}
    result = {f"mean_{name}_ms": sum(seconds) / len(seconds) * 1e3}
    for q in PERCENTILES:
        result[f"p{q}_{name}_ms"] = percentile(seconds, q) * 1e3
    return result


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Token ids; prompt i of a seed is the same whatever the count."""
    low = 100 if vocab_size > 300 else 1  # special tokens tend to stand first
    ids = range(low, vocab_size)
    return [random.Random(f"{seed}/{i}").choices(ids, k=length) for i in range(count)]


def show(title: str, figures: dict[str, Any]) -> None:
    width = max(map(len, figures))
    print(title)
    for name, value in figures.items():
        text = f"{value:,.2f}" if isinstance(value, float) else str(value)
        print(f"  {name:<{width}}  {text}")


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """To a file, or to stdout for `-`."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if path == "-":
        print(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
