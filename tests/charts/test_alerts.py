"""Each alert fires on its fault and clears: unit tests that promtool runs on the rendered rules."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import yaml

from charts.sources.alerts import ALERTS
from charts.sources.dashboards import DASHBOARDS
from tests.fakes.chart import Chart, one
from tests.tools import prometheus as tools

if TYPE_CHECKING:
    from pathlib import Path

R, E, O = "octavo_router_", "octavo_", "octavo_operator_"  # noqa: E741
POD = 'model_name="m", engine="0", namespace="a", pod="p"'


@dataclass(frozen=True)
class Fault:
    """Series by the minute; minutes at which the alert fires, and does not."""

    series: dict[str, str]
    fires: int
    clears: int
    fires_again: int | None = None  # by another of its series


FAULTS = {
    "OctavoErrorBudgetBurnsFast": Fault(
        {f'{R}requests_total{{model="m", code="200", outcome="ok"}}': "0+60x800",
         f'{R}requests_total{{model="m", code="200", outcome="failed"}}':
            "0x60 0+30x60 1800x600"}, 75, 130),
    "OctavoErrorBudgetBurnsSlowly": Fault(
        {f'{R}requests_total{{model="m", code="200", outcome="ok"}}': "0+60x800",
         f'{R}requests_total{{model="m", code="200", outcome="failed"}}':
            "0x60 0+30x60 1800x600"}, 120, 260),
    "OctavoTTFTBudgetBurnsFast": Fault(
        {f'{R}time_to_first_token_seconds_bucket{{pool="a", le="2.5"}}':
            "0+60x60 3600x60 3600+60x600",
         f'{R}time_to_first_token_seconds_count{{pool="a"}}': "0+60x800"}, 110, 130),
    "OctavoTTFTBudgetBurnsSlowly": Fault(
        {f'{R}time_to_first_token_seconds_bucket{{pool="a", le="2.5"}}':
            "0+60x60 3600x60 3600+60x900",
         f'{R}time_to_first_token_seconds_count{{pool="a"}}': "0+60x1100"}, 115, 260),
    "OctavoNoEngines": Fault(
        {f'{R}rejections_total{{pool="a", reason="no_endpoints"}}': "0x10 0+5x20 100x60"}, 20, 45),
    "OctavoQueueSlow": Fault(
        {f'{R}queue_duration_seconds_bucket{{pool="a", le="5.0"}}': "0x120",
         f'{R}queue_duration_seconds_bucket{{pool="a", le="30.0"}}': "0+10x60 600x60",
         f'{R}queue_duration_seconds_bucket{{pool="a", le="+Inf"}}': "0+10x60 600x60"}, 30, 80),
    "OctavoRequestsLost": Fault(
        {f'{R}retries_exhausted_total{{pool="a"}}': "0+6x60 360x60",
         f'{R}request_duration_seconds_count{{pool="a"}}': "0+60x120"}, 20, 80),
    "OctavoRequestKillsEngines": Fault(
        {f'{R}quarantined_requests_total{{pool="a"}}': "0x10 1x80"}, 15, 40),
    "OctavoHitRateCollapsed": Fault(
        {f'{R}prefix_cached_tokens_total{{pool="a"}}': "0+60x1500 90000+6x120 90720+60x200",
         f'{R}prefix_queried_tokens_total{{pool="a"}}': "0+100x1900"}, 1580, 1700),
    "OctavoClockSet": Fault(
        {f"{E}clock_jumps_total{{{POD}}}": "0x10 1x100",
         f'{R}clock_jumps_total{{namespace="a", pod="r"}}': "0x60 1x50"}, 15, 40, 65),
    "OctavoEngineStalled": Fault(
        {f'{E}engine_state{{{POD}, state="stalled"}}': "0x10 1x20 0x20"}, 15, 40),
    "OctavoEngineCorrupt": Fault({f"{E}corrupted_requests_total{{{POD}}}": "0x10 1x60"}, 12, 40),
    "OctavoKVCacheFull": Fault(
        {f"{E}kv_cache_usage_perc{{{POD}}}": "0.99x60 0.5x60",
         f"{E}num_preemptions_total{{{POD}}}": "0+60x120"}, 30, 80),
    "OctavoEnginesEjected": Fault(
        {f'{R}endpoints{{pool="a", state="ejected"}}': "1x30 0x30"}, 10, 40),
    "OctavoSignalsStale": Fault(
        {f'{R}endpoint_signal_age_seconds{{pool="a", endpoint="e"}}': "60x30 1x30"}, 10, 40),
    "OctavoDiscoveryFailing": Fault(
        {f'{R}discovery_errors_total{{source="kubernetes"}}': "0+1x60 60x60",
         f'{R}discovery_age_seconds{{source="kubernetes"}}': "300x60 1x60"}, 30, 80),
    "OctavoRouterLoopSlow": Fault(
        {f'{R}event_loop_lag_seconds_bucket{{namespace="a", pod="p", le="0.1"}}': "0x120",
         f'{R}event_loop_lag_seconds_bucket{{namespace="a", pod="p", le="1.0"}}':
            "0+60x60 3600x60",
         f'{R}event_loop_lag_seconds_bucket{{namespace="a", pod="p", le="+Inf"}}':
            "0+60x60 3600x60"}, 30, 80),
    "OctavoRouterConfigRefused": Fault(
        {f'{R}config_reloads_total{{namespace="a", pod="p", outcome="failed"}}': "0x5 1x60"},
        8, 30),
    "OctavoRoutersAbsent": Fault({f'{R}info{{version="1"}}': "_x30 1x30"}, 15, 45),
    "OctavoOperatorWithoutLeader": Fault({f'{O}is_leader{{pod="p"}}': "0x30 1x30"}, 10, 40),
    "OctavoReconcileFailing": Fault(
        {f'{O}reconciles_total{{outcome="failed"}}': "0+60x60 3600x60",
         f'{O}reconciles_total{{outcome="done"}}': "0+10x120"}, 30, 80),
    "OctavoOperatorWatchStale": Fault({f'{O}watch_age_seconds{{pod="p"}}': "700x30 1x30"}, 10, 40),
    "OctavoRoutersUnheard": Fault(
        {f'{O}router_errors_total{{reason="tls"}}': "0+1x30 30x60"}, 15, 45),
    "OctavoOperatorBug": Fault({f'{O}bugs_total{{pod="p"}}': "0x5 1x60"}, 8, 30),
}  # fmt: skip


@pytest.fixture(scope="module")
def promtool() -> str:
    program = tools.tool("promtool")
    if program is None:
        pytest.skip(tools.MISSING)
    return program


@pytest.fixture(scope="module")
def rules(chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that Prometheus would read: the PrometheusRule's spec."""
    folder = tmp_path_factory.mktemp("rules")
    rule = one(chart.objects({"alerts": {"enabled": True}}), "PrometheusRule", "octavo")
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    return path


def test_promtool_takes_the_rules(promtool: str, rules: Path):
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_each_alert_fires_on_its_fault_and_clears(promtool: str, rules: Path):
    """Each beside its rule alone: a day in minutes of one is not a day of all."""
    assert FAULTS.keys() == {alert.name for alert in ALERTS}
    found = {
        rule["alert"]: rule
        for group in yaml.safe_load(rules.read_text())["groups"]
        for rule in group["rules"]
    }
    paths = []
    for name, fault in FAULTS.items():
        own = rules.with_name(f"{name}.rules.yaml")
        own.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [found[name]]}]}))
        firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        test = {
            "interval": "1m",
            "input_series": [{"series": k, "values": v} for k, v in fault.series.items()],
            "promql_expr_test": [
                {"expr": firing, "eval_time": f"{fault.fires}m",
                 "exp_samples": [{"labels": "{}", "value": 1}]},
                {"expr": firing, "eval_time": f"{fault.clears}m", "exp_samples": []},
                {"expr": firing, "eval_time": "0m", "exp_samples": []},
                *(
                    {"expr": firing, "eval_time": f"{minute}m",
                     "exp_samples": [{"labels": "{}", "value": 1}]}
                    for minute in (fault.fires_again,) if minute is not None
                ),
            ],
        }  # fmt: skip
        paths.append(rules.with_name(f"{name}.tests.yaml"))
        paths[-1].write_text(yaml.safe_dump({"rule_files": [own.name], "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_summaries_are_sentences_for_people(promtool: str, rules: Path):
    """One of them in full, with labels and value put in."""
    fault = FAULTS["OctavoTTFTBudgetBurnsFast"]
    expected = {
        "exp_labels": {"severity": "critical", "pool": "a"},
        "exp_annotations": {
            "summary": "a: 83.33% of first tokens come late",
            "description": "First tokens are late far more often than the objective allows.",
            "runbook_url": "docs/runbook.md#octavottftbudgetburnsfast",
        },
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in fault.series.items()],
        "alert_rule_test": [
            {"eval_time": "110m", "alertname": "OctavoTTFTBudgetBurnsFast",
             "exp_alerts": [expected]}
        ],
    }  # fmt: skip
    path = rules.with_name("summary.yaml")
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_to_a_chapter_of_the_runbook(chart: Chart):
    from tests.fakes.chart import CHART

    page = (CHART.parents[1] / "docs" / "runbook.md").read_text()
    chapters = {title.lower() for title in re.findall(r"^## (\w+)$", page, re.MULTILINE)}
    rule = one(chart.objects({"alerts": {"enabled": True}}), "PrometheusRule", "octavo")
    links = {
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
    }
    assert links == {f"docs/runbook.md#{alert.anchor}" for alert in ALERTS}
    assert {link.partition("#")[2] for link in links} <= chapters
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= chapters


def test_dashboards_and_panels_that_the_runbook_names_are_there():
    titles = {f"Octavo / {dashboard.title}" for dashboard in DASHBOARDS}
    titles |= {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels()}
    named = {
        name
        for alert in ALERTS
        for text in (*alert.look, *alert.do)
        for name in re.findall(r"\*([^*]+)\*", text)
    }
    assert named - titles == set()
    assert "Octavo / Overview" in named


def test_objectives_and_labels_are_those_of_the_values(chart: Chart):
    values = {
        "alerts": {
            "enabled": True, "labels": {"team": "llm", "severity": "none"},
            "disabled": ["OctavoNoEngines"], "runbookURL": "https://wiki/octavo",
            "slo": {"availability": 0.99, "ttftShare": 0.9, "ttftSeconds": 5},
        }
    }  # fmt: skip
    rule = one(chart.objects(values), "PrometheusRule", "octavo")
    found = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert found.keys() == FAULTS.keys() - {"OctavoNoEngines"}
    fast = found["OctavoErrorBudgetBurnsFast"]
    assert "> 14.4 * (1 - 0.99)" in fast["expr"]
    assert fast["labels"] == {"severity": "critical", "team": "llm"}
    late = found["OctavoTTFTBudgetBurnsFast"]["expr"]
    assert 'le="5.0"' in late and "> 6 * (1 - 0.9)" in late
    assert fast["annotations"]["runbook_url"] == "https://wiki/octavo#octavoerrorbudgetburnsfast"
