"""Measured steps under the roof of this machine, as a picture. Needs matplotlib."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

from octavo.plotting import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from octavo.measure.machine_limits import MachineLimits
    from octavo.measure.study import Series

_COLOURS = ("#1f6f8b", "#d1793b", "#5b8c5a", "#8a5a9e")
_ROOF = "#59646a"
_NUMBERED = ("1", "8", "64")  # more would cover each other
_WIDEN = 2.5  # of the axes beyond the outermost points


def draw(path: Path, limits: MachineLimits, series: Sequence[Series]) -> None:
    figure = require(path).Figure(figsize=(8.4, 5.2), layout="tight")
    axis = figure.subplots()
    intensities = [x for one in series for _, x, _ in one.points]
    rates = [y for one in series for _, _, y in one.points]
    left, right = min(intensities) / _WIDEN, max(intensities) * _WIDEN
    # Between batches and prompts there is room for words.
    middle = sqrt(_outermost(series, "decode", max) * _outermost(series, "prompt", min))
    roofs = {one.peak for one in series if one.peak in limits.gemm_gflop_s}
    for dtype in sorted(roofs, key=lambda dtype: limits.gemm_gflop_s[dtype]):
        _roof(axis, limits.read_gb_s, limits.gemm_gflop_s[dtype], dtype, (left, right), middle)
    for number, one in enumerate(series):
        _points(axis, one, _COLOURS[number % len(_COLOURS)], is_above=number < len(series) / 2)
    axis.scatter([], [], s=40, color=_ROOF, marker="D", label="a prompt")
    axis.scatter([], [], s=30, color=_ROOF, label="sequences that decode together: 1, 8, 64")
    top = max([*rates, *(limits.gemm_gflop_s[dtype] for dtype in roofs)])
    axis.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(min(rates) / _WIDEN, top * 2),
        xlabel="FLOP per byte read", ylabel="GFLOP/s",
    )  # fmt: skip
    axis.set_title(
        f"Steps under the roof of this machine: {limits.machine}, "
        f"{limits.read_gb_s:.1f} GB/s",
        fontsize=11, loc="left",
    )  # fmt: skip
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
    axis.grid(which="major", color="#e4e8ea", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=140)


def _outermost(
    series: Sequence[Series], kind: str, choose: Callable[[list[float]], float]
) -> float:
    return choose([x for one in series for label, x, _ in one.points if label.startswith(kind)])


def _roof(
    axis: Any, gb_s: float, peak: float, dtype: str, span: tuple[float, float], middle: float
) -> None:
    left, right = span
    ridge = peak / gb_s
    xs = [left, ridge, right] if left < ridge < right else [left, right]
    axis.plot(xs, [min(x * gb_s, peak) for x in xs], color=_ROOF, linewidth=1.6, zorder=1)
    axis.annotate(
        f"{dtype} GEMM peak, {peak:.0f} GFLOP/s", (max(middle, ridge), peak), (0, 4),
        textcoords="offset points", ha="center", va="bottom", fontsize=8.5, color=_ROOF,
    )  # fmt: skip


def _points(axis: Any, one: Series, colour: str, *, is_above: bool) -> None:
    """Two series often lie close: one has its numbers above, the next below."""
    decode = [point for point in one.points if point[0].startswith("decode")]
    prompts = [point for point in one.points if point not in decode]
    xs, ys = [x for _, x, _ in decode], [y for _, _, y in decode]
    axis.plot(xs, ys, color=colour, linewidth=0.9, alpha=0.5, zorder=2)
    axis.scatter(xs, ys, s=30, color=colour, label=one.name, zorder=3)
    axis.scatter(
        [x for _, x, _ in prompts], [y for _, _, y in prompts],
        s=40, color=colour, marker="D", zorder=3,
    )  # fmt: skip
    offset, side = ((-4, 4), "right") if is_above else ((4, -11), "left")
    for label, x, y in decode:
        number = label.removeprefix("decode ")
        if number in _NUMBERED:
            axis.annotate(
                number, (x, y), offset, textcoords="offset points", ha=side, fontsize=8,
                color=colour, zorder=4,
            )  # fmt: skip
