"""Every query of every panel and alert, asked of a real Prometheus that scrapes a real stack."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from charts.sources.alerts import ALERTS
from charts.sources.dashboards import DASHBOARDS, grafana
from octavo_engine.protocol import metric_names
from octavo_operator import metrics as operator_metrics
from tests.charts.prometheus import Prometheus, scraped
from tests.fakes.chart import CHART
from tests.tools import prometheus as tools

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

_NAME = re.compile(r"\boctavo_\w+")
_SELECTOR = re.compile(r"(octavo_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"by \(([^)]*)\)")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = tools.tool("prometheus")
    if program is None:
        pytest.skip(tools.MISSING)
    with scraped(program, tmp_path_factory.mktemp("prometheus")) as running:
        yield running


def panels() -> Iterator[tuple[str, str]]:
    """(where, expression) from the files that Grafana gets."""
    for file in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{file.stem}: {panel['title']} {target['refId']}", target["expr"]


PANELS = dict(panels())


def as_grafana_asks(expr: str) -> str:
    for name, value in (
        ("$__rate_interval", "1m"), ("$__range", "1m"), ("$__interval_ms", "1000"),
        ("$__interval", "1s"), ("$pool", ".*"), ("$model", ".*"), ("$tenant", ".*"),
        ("$price", "1.00"),
    ):  # fmt: skip
        expr = expr.replace(name, value)
    return expr


@pytest.mark.parametrize("where", PANELS)
def test_every_query_of_every_panel_returns_a_series(prometheus: Prometheus, where: str):
    prometheus.until(as_grafana_asks(PANELS[where]))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_metric_and_label_of_every_alert_exists(prometheus: Prometheus, alert: Any):
    """Also what is compared away while all is well: each selector alone finds series, and what is
    grouped by is a label of them."""
    expr = in_full(alert.expr)
    prometheus.query(expr)
    labels: set[str] = set()
    for name, matchers in _SELECTOR.findall(expr):
        found = prometheus.until(f"{name}{{{matchers}}}")
        labels |= {label for series in found for label in series["metric"]}
    for group in _BY.findall(expr):
        assert set(group.split(", ")) <= labels
    for label in re.findall(r"\$labels\.(\w+)", alert.summary):
        assert label in labels, label


def in_full(expr: str) -> str:
    for name, value in (("AVAILABILITY", "0.999"), ("TTFT_SHARE", "0.95"), ("TTFT_SECONDS", "2.5")):
        expr = expr.replace(f"__{name}__", value)
    return expr


def test_every_variable_of_every_dashboard_has_values(prometheus: Prometheus):
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            if isinstance(variable, grafana.Field):
                assert float(variable.value) > 0
                continue
            found = prometheus.until(f"count by ({variable.label}) ({variable.metric})")
            assert all(series["metric"].get(variable.label) for series in found), variable


def test_queries_use_the_names_of_the_code():
    """A rename there is a rename here: no query has a name of its own."""
    declared = {
        value for module in (metric_names, operator_metrics) for value in vars(module).values()
        if isinstance(value, str) and value.startswith("octavo_")
    }  # fmt: skip
    for expr in (*PANELS.values(), *(alert.expr for alert in ALERTS)):
        for name in _NAME.findall(expr):
            stems = {name, *(name.removesuffix(s) for s in ("_total", "_bucket", "_sum", "_count",
                                                            "_info"))}  # fmt: skip
            assert stems & declared, name


def test_legends_name_labels_that_their_query_keeps():
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels():
            for query in panel.queries:
                kept = {label for group in _BY.findall(query.expr) for label in group.split(", ")}
                used = set(re.findall(r"{{(\w+)}}", query.legend))
                if kept:
                    assert used <= kept, (dashboard.name, panel.title, query.legend)


def test_panels_do_not_overlap():
    for dashboard in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(grafana.render(dashboard))["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                     for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
            assert not cells & taken, (dashboard.name, panel["title"])
            assert at["x"] + at["w"] <= 24
            taken |= cells
