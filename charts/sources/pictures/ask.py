"""A dashboard's queries, sent to a Prometheus as Grafana does: variables put in, and by the step.

Reads the JSON that Grafana gets, so what it shows is what the chart installs.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import build_opener

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

POINTS = 240  # of a graph
SCRAPES = 4  # in the window of a rate: Grafana's $__rate_interval
_DURATION = re.compile(r"(\d+)(ms|[smh])")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LABEL = re.compile(r"{{(\w+)}}")
_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")


class PrometheusError(Exception):
    """It is not there, or refuses a query."""


@dataclass(frozen=True, slots=True)
class Series:
    legend: str
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What a picture shows. Times in Unix seconds."""

    start: float
    end: float

    @property
    def step_s(self) -> float:
        return max(1.0, (self.end - self.start) / POINTS)


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opener = build_opener()

    def get(self, path: str, **parameters: object) -> Any:
        """Raises PrometheusError."""
        url = f"{self._url}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with self._opener.open(url, timeout=60) as answer:
                body = json.load(answer)
        except (OSError, ValueError) as error:
            raise PrometheusError(f"{self._url} does not answer {path}: {error}") from None
        return body["data"]

    def scrape_interval_s(self) -> float:
        text = self.get("status/config")["yaml"]
        found = re.search(r"^  scrape_interval: (\w+)$", text, re.MULTILINE)
        return seconds(found[1]) if found else 60.0

    def label_values(self, metric: str, label: str, span: Span) -> list[str]:
        parameters = {"match[]": metric, "start": span.start, "end": span.end}
        return sorted(self.get(f"label/{label}/values", **parameters))


def seconds(duration: str) -> float:
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


def substitutions(
    dashboard: Mapping[str, Any], prometheus: Prometheus, span: Span, given: Mapping[str, str]
) -> dict[str, str]:
    """What stands for each variable, longest names first. `given` has the user's choices."""
    window_s = max(SCRAPES * prometheus.scrape_interval_s(), span.step_s)
    step_ms = round(span.step_s * 1000)
    chosen = {
        "__rate_interval": f"{round(window_s * 1000)}ms",
        "__range": f"{round(span.end - span.start)}s",
        "__interval_ms": str(step_ms),
        "__interval": f"{step_ms}ms",
    }
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] == "textbox":
            chosen[name] = given.get(name, variable["query"])
        elif variable["type"] == "query":
            chosen[name] = given.get(name) or _first_choice(variable, prometheus, span)
    return dict(sorted(chosen.items(), key=lambda item: -len(item[0])))


def _first_choice(variable: Mapping[str, Any], prometheus: Prometheus, span: Span) -> str:
    if variable["includeAll"]:
        return str(variable["allValue"])
    found = _VALUES.fullmatch(variable["query"]["query"])
    assert found, variable["query"]
    values = prometheus.label_values(found[1], found[2], span)
    return values[0] if values else ".*"


def put_in(expr: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        expr = expr.replace(f"${name}", value)
    return expr


def series_of(
    panel: Mapping[str, Any], prometheus: Prometheus, span: Span, values: Mapping[str, str]
) -> Iterator[Series]:
    """Every line of a panel; of a stat each line's last value is shown. Raises PrometheusError."""
    is_stat = panel["type"] == "stat"
    for target in panel["targets"]:
        expr = put_in(target["expr"], values)
        if is_stat:  # of its end: sums over the time shown need no graph
            rows = prometheus.get("query", query=expr, time=span.end)["result"]
            rows = [{**row, "values": [row["value"]]} for row in rows]
        else:
            span_query = {"start": span.start, "end": span.end, "step": span.step_s}
            rows = prometheus.get("query_range", query=expr, **span_query)["result"]
        for row in rows:
            points = [(float(at), float(value)) for at, value in row["values"]]
            kept = [point for point in points if math.isfinite(point[1])]
            if kept:
                times, numbers = zip(*kept, strict=True)
                yield Series(_legend(target["legendFormat"], row["metric"]), times, numbers)


def _legend(form: str, labels: Mapping[str, str]) -> str:
    if form == "__auto":
        return ", ".join(v for k, v in sorted(labels.items()) if k != "__name__")
    return _LABEL.sub(lambda found: labels.get(found[1], ""), form).strip()
