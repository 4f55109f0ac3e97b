"""`python -m charts.sources.pictures --prometheus URL overview model`: dashboards as PNG files.

For documentation: each picture is drawn from the JSON that the chart installs and from what this
Prometheus answers to its queries. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from charts.sources.pictures.ask import Prometheus, PrometheusError, Span, series_of, substitutions

DASHBOARDS = Path("charts/octavo/dashboards")
EXIT_FAILED = 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m charts.sources.pictures")
    parser.add_argument("dashboards", nargs="*", help="names; default: all")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0, help="how much time is shown")
    parser.add_argument("--until", type=float, metavar="UNIX", help="where it ends; default: now")
    parser.add_argument("--to", type=Path, default=Path("docs/images"), metavar="FOLDER")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a variable of the dashboards; default: the first value, or all",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        from charts.sources.pictures.draw import draw
    except ImportError:
        parser.error("pictures need matplotlib: pip install matplotlib")
    known = sorted(path.stem for path in DASHBOARDS.glob("*.json"))
    for name in args.dashboards:
        if name not in known:
            parser.error(f"there is no dashboard {name}; known: {', '.join(known)}")
    given = dict(each.split("=", 1) for each in args.set if "=" in each)
    if len(given) != len(args.set):
        parser.error("--set must be NAME=VALUE, each name once")
    end = args.until or time.time()
    span = Span(end - 60 * args.minutes, end)
    prometheus = Prometheus(args.prometheus)
    try:
        for name in args.dashboards or known:
            dashboard = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
            chosen = substitutions(dashboard, prometheus, span, given)
            found = {
                panel["id"]: list(series_of(panel, prometheus, span, chosen))
                for panel in dashboard["panels"]
                if panel["type"] != "row"
            }
            path = args.to / f"dashboard-{name}.png"
            draw(path, dashboard, chosen, found, span)
            print(f"Drew {path}")  # noqa: T201
    except PrometheusError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
