"""The Grafana dashboards: a table of panels each, rendered into charts/octavo/dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from charts.sources.dashboards import grafana
from charts.sources.dashboards.cost import COST
from charts.sources.dashboards.engines import ENGINES
from charts.sources.dashboards.model import MODEL
from charts.sources.dashboards.operator import OPERATOR
from charts.sources.dashboards.overview import OVERVIEW
from charts.sources.dashboards.router import ROUTER

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARDS = (OVERVIEW, MODEL, ROUTER, ENGINES, OPERATOR, COST)


def render() -> Iterator[tuple[str, str]]:
    """(name, JSON) of each."""
    for dashboard in DASHBOARDS:
        yield dashboard.name, grafana.render(dashboard)
