"""Pictures of dashboards: what is asked, how numbers read, and that something is drawn."""

from __future__ import annotations

import json
import struct
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from charts.sources.pictures.__main__ import main
from charts.sources.pictures.ask import (
    Prometheus,
    Span,
    put_in,
    seconds,
    series_of,
    substitutions,
)
from charts.sources.pictures.units import formatted
from tests.fakes.chart import CHART

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SPAN = Span(1_000_000.0, 1_000_240.0)


def dashboard(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
    return body


@contextmanager
def prometheus(status: int = 200) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Answers every query with two lines, one of which is NaN at first; keeps what it was asked."""
    requested: list[tuple[str, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            given = {name: values[0] for name, values in parse_qs(url.query).items()}
            requested.append((url.path.removeprefix("/api/v1/"), given))
            body = json.dumps({"status": "success", "data": _data(requested[-1][0])}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requested
        server.shutdown()
        thread.join()


def _data(path: str) -> Any:
    if path == "status/config":
        return {"yaml": "global:\n  scrape_interval: 15s\n  scrape_timeout: 10s\n"}
    if path.startswith("label/"):
        return ["b", "a"]
    points = [[SPAN.start, "NaN"], [SPAN.start + 60, "1"], [SPAN.start + 61, "3"]]
    rows = [
        {"metric": {"pool": name, "__name__": "x"}, "value": points[-1], "values": points}
        for name in ("p", "q")
    ]
    return {"resultType": "any", "result": rows}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.01234, "s", "12.3 ms"), (75, "s", "1.25 min"), (0.0000021, "s", "2.1 µs"),
        (0, "s", "0 ms"), (0.987, "percentunit", "98.7%"), (1234567, "short", "1.23 M"),
        (12, "short", "12"), (0.25, "reqps", "0.25 req/s"), (1500, "tokens/s", "1.5 k tokens/s"),
        (3 * 2**20, "bytes", "3 MiB"), (2, "h", "2 h"), (float("nan"), "s", "no data"),
        (999.6, "ops", "1000 ops/s"),
    ],
)  # fmt: skip
def test_numbers_read_as_on_a_dashboard(value, unit, text):
    assert formatted(value, unit) == text


def test_every_unit_of_our_dashboards_is_known():
    units = {
        panel["fieldConfig"]["defaults"]["unit"]
        for file in (CHART / "dashboards").glob("*.json")
        for panel in json.loads(file.read_text())["panels"]
        if panel["type"] != "row"
    }
    assert units <= {"s", "bytes", "percentunit", "short", "reqps", "ops", "tokens/s", "h"}


def test_variables_are_put_in_as_grafana_would():
    with prometheus() as (url, _):
        values = substitutions(dashboard("cost"), Prometheus(url), SPAN, {"tenant": "team-a"})
    assert values["__rate_interval"] == "60000ms"  # four scrapes
    assert values["__range"] == "240s"
    assert (values["__interval"], values["__interval_ms"]) == ("1000ms", "1000")
    assert (values["tenant"], values["model"], values["price"]) == ("team-a", ".*", "1.00")
    assert put_in("x[$__range:$__interval] * $__interval_ms", values) == ("x[240s:1000ms] * 1000")


def test_a_choice_of_one_is_the_first_until_another_is_given():
    with prometheus() as (url, _):
        requested = Prometheus(url)
        assert substitutions(dashboard("model"), requested, SPAN, {})["model"] == "a"
        assert substitutions(dashboard("model"), requested, SPAN, {"model": "b"})["model"] == "b"


def test_no_query_is_sent_with_a_variable_left_in_it():
    for file in sorted((CHART / "dashboards").glob("*.json")):
        body = json.loads(file.read_text())
        with prometheus() as (url, requested):
            server = Prometheus(url)
            values = substitutions(body, server, SPAN, {})
            for panel in body["panels"]:
                if panel["type"] != "row":
                    lines = list(series_of(panel, server, SPAN, values))
                    assert len(lines) == 2 * len(panel["targets"])
        queries = [given["query"] for path, given in requested if path.startswith("query")]
        assert queries and not [query for query in queries if "$" in query]


def test_a_graph_is_asked_over_its_time_and_what_is_no_number_left_out():
    panel = {
        "type": "timeseries",
        "targets": [{"expr": "x[$__rate_interval]", "legendFormat": "{{pool}} p95"}],
    }
    with prometheus() as (url, requested):
        lines = list(series_of(panel, Prometheus(url), SPAN, {"__rate_interval": "60s"}))
    assert [line.legend for line in lines] == ["p p95", "q p95"]
    assert lines[0].values == (1.0, 3.0)
    assert requested == [
        ("query_range", {"query": "x[60s]", "start": str(SPAN.start), "end": str(SPAN.end),
                         "step": "1.0"})
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [("15s", 15), ("1m30s", 90), ("250ms", 0.25)])
def test_durations_are_read(text, expected):
    assert seconds(text) == expected


def test_a_dashboard_becomes_a_picture_of_its_size(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with prometheus() as (url, _):
        given = ["--prometheus", url, "--until", str(SPAN.end), "--minutes", "4"]
        assert main([*given, "--to", str(tmp_path), "cost"]) == 0
    path = tmp_path / "dashboard-cost.png"
    assert f"Drew {path}" in capsys.readouterr().out
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width == 1488  # 24 columns of 62 points
    assert height > 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing"], "there is no dashboard nothing; known: cost, engines"),
        (["--set", "model", "cost"], "--set must be NAME=VALUE"),
    ],
)
def test_what_cannot_be_drawn_is_told(arguments, problem, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(SystemExit):
        main(["--prometheus", "http://127.0.0.1:9", *arguments])
    assert problem in capsys.readouterr().err


def test_a_prometheus_that_does_not_answer_is_named(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main(["--prometheus", "http://127.0.0.1:9", "--to", str(tmp_path), "cost"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
