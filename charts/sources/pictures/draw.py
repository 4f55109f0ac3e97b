"""Panels on a grid, as Grafana lays them out: graphs, stacked bars and single numbers."""

from __future__ import annotations

import datetime
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from charts.sources.pictures.units import formatted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from charts.sources.pictures.ask import Series, Span

COLUMNS, COLUMN_IN, ROW_IN, HEAD_IN, FOOT_IN, GAP_IN = 24, 0.62, 0.31, 0.62, 0.42, 0.05
DPI = 100
PAGE, CARD, EDGE, TEXT, DIM = "#f4f5f5", "#ffffff", "#dcdee0", "#24292e", "#6e7681"
PALETTE = (
    "#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#0a9aa6", "#c9a000", "#8f5a2b",
    "#d66fb0", "#5d6770",
)  # fmt: skip
CAPTION = "Drawn from the dashboard's own queries, answered by Prometheus; not by Grafana."
MAX_LEGENDS = 8
NARROW_IN = 3.0
TICKS_S = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
MAX_TICKS = 5


def draw(
    path: Path,
    dashboard: Mapping[str, Any],
    chosen: Mapping[str, str],
    found: Mapping[int, Sequence[Series]],
    span: Span,
) -> None:
    """`found` by the panel's id."""
    from matplotlib import figure

    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width = COLUMNS * COLUMN_IN
    height = HEAD_IN + rows * ROW_IN + FOOT_IN
    page = figure.Figure(figsize=(width, height), facecolor=PAGE, dpi=DPI)
    page.text(
        0.15 / width, 1 - 0.3 / height, dashboard["title"], color=TEXT, fontsize=15,
        fontweight="bold", va="center",
    )  # fmt: skip
    page.text(
        1 - 0.15 / width, 1 - 0.3 / height, _head(dashboard, chosen, span), color=DIM, fontsize=10,
        ha="right", va="center",
    )  # fmt: skip
    page.text(0.5, 0.2 / height, CAPTION, color=DIM, fontsize=9, ha="center", va="center")
    for panel in panels:
        at = panel["gridPos"]
        left, right = at["x"] * COLUMN_IN + GAP_IN, (at["x"] + at["w"]) * COLUMN_IN - GAP_IN
        top = HEAD_IN + at["y"] * ROW_IN + GAP_IN
        bottom = HEAD_IN + (at["y"] + at["h"]) * ROW_IN - GAP_IN
        box = _Box(page, left, height - bottom, right - left, bottom - top)
        if panel["type"] == "row":
            box.text(0.05, box.height / 2, panel["title"], size=11, weight="bold")
        else:
            _panel(box, panel, found[panel["id"]], span)
    page.savefig(path)


def _head(dashboard: Mapping[str, Any], chosen: Mapping[str, str], span: Span) -> str:
    shown = []
    for variable in dashboard["templating"]["list"]:
        value = chosen.get(variable["name"])
        if value is not None:
            shown.append(f"{variable['label']}: {'All' if value == '.*' else value}")
    shown.append(f"last {round((span.end - span.start) / 60)} minutes")
    return "     ".join(shown)


class _Box:
    """A part of the page, in inches from its lower left corner."""

    def __init__(self, page: Any, left: float, bottom: float, width: float, height: float) -> None:
        self.page, self.left, self.bottom, self.width, self.height = (
            page, left, bottom, width, height,
        )  # fmt: skip
        self._page_w, self._page_h = page.get_size_inches()

    def text(
        self, x: float, y: float, text: str, *, size: float, colour: str = TEXT, **more: Any
    ) -> None:
        self.page.text(
            (self.left + x) / self._page_w, (self.bottom + y) / self._page_h, text, color=colour,
            fontsize=size, va=more.pop("va", "center"), **more,
        )  # fmt: skip

    def card(self) -> None:
        from matplotlib.patches import Rectangle

        self.page.patches.append(
            Rectangle(
                (self.left / self._page_w, self.bottom / self._page_h),
                self.width / self._page_w, self.height / self._page_h,
                facecolor=CARD, edgecolor=EDGE, linewidth=0.8, transform=self.page.transFigure,
                zorder=-1,
            )
        )  # fmt: skip

    def axes(self, left: float, bottom: float, right: float, top: float) -> Any:
        """Within these margins."""
        return self.page.add_axes(
            (
                (self.left + left) / self._page_w,
                (self.bottom + bottom) / self._page_h,
                (self.width - left - right) / self._page_w,
                (self.height - bottom - top) / self._page_h,
            ),
            facecolor=CARD,
        )


def _panel(box: _Box, panel: Mapping[str, Any], series: Sequence[Series], span: Span) -> None:
    box.card()
    size = 10 if box.width > NARROW_IN else 8.5
    box.text(0.1, box.height - 0.16, panel["title"], size=size, weight="bold")
    defaults = panel["fieldConfig"]["defaults"]
    if not series:
        box.text(box.width / 2, box.height / 2, "No data", size=11, colour=DIM, ha="center")
    elif panel["type"] == "stat":
        _numbers(box, defaults["unit"], series)
    else:
        _graph(box, defaults, series, span)


def _numbers(box: _Box, unit: str, series: Sequence[Series]) -> None:
    """Beside each other, the largest first; a single one has no name."""
    shown = sorted(series, key=lambda one: -one.values[-1])[:3]
    for place, one in enumerate(shown):
        x = box.width * (place + 0.5) / len(shown)
        name = one.legend if len(series) > 1 or one.legend else ""
        y = box.height * (0.44 if not name else 0.48)
        size = 21 if len(shown) == 1 else 16
        box.text(x, y, formatted(one.values[-1], unit), size=size, ha="center")
        if name:
            box.text(x, 0.14, name, size=8, colour=DIM, ha="center")


def _graph(box: _Box, defaults: Mapping[str, Any], series: Sequence[Series], span: Span) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = box.axes(0.82, 0.64, 0.12, 0.34)
    custom = defaults["custom"]
    is_stacked = "stacking" in custom
    shown = sorted(series, key=lambda one: -max(one.values))
    if is_stacked:
        _bars(axes, shown, span)
    else:
        for colour, one in zip(_colours(), shown, strict=False):
            for times, values in _runs(one, 4 * span.step_s):
                axes.plot(times, values, color=colour, linewidth=1.1)
                axes.fill_between(times, values, color=colour, alpha=0.08, linewidth=0)
    axes.set_xlim(span.start, span.end)
    top = defaults.get("max")
    axes.set_ylim(0, top if top is not None else max(axes.get_ylim()[1], 1e-9))
    if top is None and max(max(one.values) for one in shown) == 0:
        axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: formatted(v, defaults["unit"])))
    axes.set_xticks(_ticks(span))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _clock(at)))
    axes.tick_params(labelsize=8, colors=DIM, length=0)
    axes.grid(color=EDGE, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _legend(box, [one.legend for one in shown])


def _legend(box: _Box, names: Sequence[str]) -> None:
    """In lines of what fits; what does not is counted."""
    x, y = 0.14, 0.3
    for number, (colour, name) in enumerate(zip(_colours(), names, strict=False)):
        needed = 0.3 + 0.066 * len(name)
        if x + needed > box.width - 0.1 and x > 0.2:
            x, y = 0.14, y - 0.17
        if y < 0.05 or number == MAX_LEGENDS:
            box.text(box.width - 0.1, 0.12, f"and {len(names) - number} more", size=8,
                     colour=DIM, ha="right")  # fmt: skip
            return
        box.text(x, y, "━", size=8, colour=colour)
        box.text(x + 0.17, y, name, size=8)
        x += needed


def _bars(axes: Any, series: Sequence[Series], span: Span) -> None:
    """Stacked, each as wide as a step."""
    width = span.step_s
    grown: dict[int, float] = {}
    for colour, one in zip(_colours(), series, strict=False):
        bottoms = [grown.get(round(at), 0.0) for at in one.times]
        axes.bar(one.times, one.values, width, bottoms, color=colour, alpha=0.8, linewidth=0)
        for at, value in zip(one.times, one.values, strict=True):
            grown[round(at)] = grown.get(round(at), 0.0) + value


def _runs(one: Series, gap_s: float) -> list[tuple[list[float], list[float]]]:
    """Cut where nothing was known for a while."""
    runs: list[tuple[list[float], list[float]]] = [([one.times[0]], [one.values[0]])]
    for (before, at), value in zip(pairwise(one.times), one.values[1:], strict=True):
        if at - before > gap_s:
            runs.append(([], []))
        runs[-1][0].append(at)
        runs[-1][1].append(value)
    return runs


def _colours() -> list[str]:
    return [PALETTE[number % len(PALETTE)] for number in range(1000)]


def _ticks(span: Span) -> list[float]:
    """At whole minutes, or whatever is round for this time."""
    lasts_s = span.end - span.start
    step_s = next((s for s in TICKS_S if lasts_s / s <= MAX_TICKS), TICKS_S[-1])
    first = math.ceil((span.start + lasts_s / 20) / step_s)  # room for the other axis
    return [float(n * step_s) for n in range(first, math.floor(span.end / step_s) + 1)]


def _clock(at: float) -> str:
    if not math.isfinite(at):
        return ""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S")
