"""The comparison as one picture: a bar for each server, the machine's limit as a line.

python -m benchmarks.peers.picture FIGURES.json PICTURE.png    (FIGURES: --json of the run)
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.plotting import require
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OURS, THEIRS, LIMIT = "#1f6f8b", "#b8c4c9", "#c0392b"
RATES = ("tok_s", "prompt_tok_s", "out_tok_s")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def draw_if_possible(path: Path, document: Mapping[str, Any]) -> None:
    try:
        draw(path, document)
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"picture: {path}", file=sys.stderr)


def draw(path: Path, document: Mapping[str, Any]) -> None:
    """`document` as --json writes it. Servers with weights of one form are beside each other."""
    module = require(path)
    servers = sorted(document["servers"], key=lambda server: server["form"] != "bf16")
    scenarios = document["scenarios"]
    size = (4.0 * len(scenarios), 0.42 * len(servers) + 1.1)
    figure = module.Figure(figsize=size, layout="tight")
    axes = figure.subplots(1, len(scenarios), squeeze=False)[0]
    names = [server["name"] for server in servers]
    for column, (axis, scenario) in enumerate(zip(axes, scenarios, strict=True)):
        rate = shown_rate(scenario["figures"])
        values = [_median(server, scenario["name"], rate) for server in servers]
        colours = [OURS if name.startswith("octavo") else THEIRS for name in names]
        bars = axis.barh(names, values, color=colours)
        labels = [f"{value:,.0f}" if value else "-" for value in values]
        axis.bar_label(bars, labels=labels, padding=3, fontsize=8)
        limits = _mark_limits(axis, servers, scenario["name"], document.get("bounds", {}))
        axis.invert_yaxis()
        axis.set_xlim(0, 1.18 * max([*values, *limits, 1e-9]))
        axis.set_xticks([])  # each bar says what it is worth
        axis.set_title(f"{scenario['name']}: tokens/s", fontsize=9, loc="left")
        axis.tick_params(labelsize=8, labelleft=column == 0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=130)


def shown_rate(figures: Sequence[str]) -> str:
    """The one among a scenario's figures of which the machine's limit is known."""
    return next(figure for figure in figures if figure in RATES)


def _median(server: Mapping[str, Any], scenario: str, rate: str) -> float:
    runs = server["runs"].get(scenario, [])
    values = [run[rate] for run in runs if rate in run]
    return statistics.median(values) if values else 0.0


def _mark_limits(
    axis: Any, servers: list[Any], scenario: str, bounds: Mapping[str, Mapping[str, float]]
) -> list[float]:
    """A line over the bars of each form; where they are."""
    limits = []
    for form, of_form in bounds.items():
        rows = [row for row, server in enumerate(servers) if server["form"] == form]
        limit = of_form.get(scenario)
        if rows and limit is not None:
            axis.vlines(limit, min(rows) - 0.45, max(rows) + 0.45, color=LIMIT, linestyle="--")
            limits.append(limit)
    return limits


if __name__ == "__main__":
    main()
