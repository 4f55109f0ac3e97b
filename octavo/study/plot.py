"""Results as a picture: a row for each workload, a bar for each policy. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.plotting import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from octavo.study.figures import Figures


_PANELS: dict[str, Callable[[Figures], float]] = {
    "hit rate, %": lambda f: f.hit_rate * 100,
    "prefilled tokens, millions": lambda f: f.num_prefilled_tokens / 1e6,
    "TTFT p50, ms": lambda f: f.ttft_p50_s * 1e3,
    "TTFT p99, ms": lambda f: f.ttft_p99_s * 1e3,
    "between tokens, ms": lambda f: f.itl_mean_s * 1e3,
}
_OURS, _OTHERS = "#1f6f8b", "#b8c4c9"


def draw(path: Path, studies: Sequence[tuple[str, Sequence[Figures]]]) -> None:
    """`studies` by name of the workload; the first policy of each stands out."""
    module = require(path)
    height = max(1.6, 0.26 * max(len(results) for _, results in studies) + 0.7)
    figure = module.Figure(figsize=(2.9 * len(_PANELS), height * len(studies)), layout="tight")
    axes = figure.subplots(len(studies), len(_PANELS), squeeze=False)
    for row, (name, results) in zip(axes, studies, strict=True):
        policies = [f.policy for f in results]
        colours = [_OURS, *[_OTHERS] * (len(results) - 1)]
        for column, (axis, (title, value)) in enumerate(zip(row, _PANELS.items(), strict=True)):
            values = [value(f) for f in results]
            bars = axis.barh(policies, values, color=colours)
            axis.bar_label(bars, labels=list(map(_label, values)), padding=2, fontsize=7)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.3 * max(values) or 1)
            axis.set_xticks([])  # each bar says what it is worth
            axis.set_title(title if column else f"{name}: {title}", fontsize=9, loc="left")
            axis.tick_params(labelsize=7, labelleft=column == 0)
            axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
