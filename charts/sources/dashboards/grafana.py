"""Panels as rows of a table, and the Grafana JSON that they become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLUMNS = 24
_HEIGHT = 8
_STAT_HEIGHT = 4
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ALL = {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
_RANGE = "$__rate_interval"  # Grafana's: at least four scrapes


@dataclass(frozen=True, slots=True)
class Query:
    """`RANGE` in the expression is the window of rates."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bars"] = "timeseries"
    help: str = ""
    width: int = 8
    most: float | None = None  # of the axis

    @property
    def height(self) -> int:
        return _STAT_HEIGHT if self.kind == "stat" else _HEIGHT


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice on top of the dashboard: the values of a label of a metric."""

    name: str
    label: str
    metric: str
    is_single: bool = False  # one at a time, the first to begin with; else any, or all


@dataclass(frozen=True, slots=True)
class Field:
    """A number on top of the dashboard that people type in."""

    name: str
    title: str
    value: str  # to begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    name: str  # of its file, and of its address
    title: str
    description: str
    variables: tuple[Variable | Field, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def render(dashboard: Dashboard) -> str:
    body = {
        "title": f"Octavo / {dashboard.title}",
        "uid": f"octavo-{dashboard.name}",
        "description": dashboard.description,
        "tags": ["octavo"],
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "tags": ["octavo"],
                "title": "Octavo",
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_layout(dashboard)),
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _layout(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number = y = 0
    for row in dashboard.rows:
        number += 1
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        }  # fmt: skip
        y += 1
        x = line = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, line = 0, y + line, 0
            number += 1
            position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield _panel(number, panel, position)
            x, line = x + panel.width, max(line, panel.height)
        y += line


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any]
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}
    else:
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
        if panel.kind == "bars":
            stacked = {"group": "A", "mode": "normal"}
            defaults["custom"] |= {"drawStyle": "bars", "fillOpacity": 80, "stacking": stacked}
    return {
        "id": number,
        "type": "stat" if panel.kind == "stat" else "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expr.replace("RANGE", _RANGE),
                "legendFormat": query.legend or "__auto",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(variable: Variable | Field) -> dict[str, Any]:
    if isinstance(variable, Field):
        value = {"text": variable.value, "value": variable.value}
        return {
            "name": variable.name,
            "label": variable.title,
            "type": "textbox",
            "query": variable.value,
            "current": value,
            "options": [{**value, "selected": True}],
        }
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "includeAll": not variable.is_single,
        "multi": not variable.is_single,
        **({} if variable.is_single else _ALL),
        "sort": 1,
    }
