"""A real Prometheus on a real stack: two simulated engines, a router, an operator's metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from octavo_operator.metrics import OperatorMetrics
from octavo_operator.watch.work_queue import KeyOutcome
from tests.fakes.http_handler import QuietHandler, handled
from tests.fakes.process import serving
from tests.fakes.router_process import routing, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fakes.router_process import RouterProcess

SCRAPE_S = 0.5
LABELS = {"namespace": "octavo-system"}  # as a PodMonitor adds them, with pod


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=20, trust_env=False)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query; raises what Prometheus says against it."""
        answer = self.client.get("/api/v1/query", params={"query": expr}).json()
        if answer["status"] != "success":
            raise AssertionError(f"{expr}: {answer['error']}")
        return list(answer["data"]["result"])

    def until(self, expr: str, limit_s: float = 30.0) -> list[dict[str, Any]]:
        """Its series, once there are some: a scrape that is late takes them away until the next."""
        end = time.monotonic() + limit_s
        while not (found := self.query(expr)):
            assert time.monotonic() < end, f"no series: {expr}"
            time.sleep(0.05)  # another process
        return found


@contextmanager
def scraped(program: str, folder: Path) -> Iterator[Prometheus]:
    """Everything is running, has been driven, and was scraped several times before and after."""
    with ExitStack() as stack:
        flags = ("--sim-step-base-ms", "3", "--served-model-name", "m")
        first = stack.enter_context(serving("m", *flags, "--shutdown-timeout", "0.1"))
        second = stack.enter_context(serving("m", *flags))
        config = folder / "router.yaml"
        config.write_text(yaml.safe_dump(_router_config(first.url, second.url)))
        router = stack.enter_context(routing("--config", str(config)))
        operator = stack.enter_context(_serving_metrics(_operator_metrics()))
        targets = {
            "engine-1": first.url, "engine-2": second.url, "router": router.url,
            "operator": operator,
        }  # fmt: skip
        prometheus = stack.enter_context(booted(program, folder, targets))
        prometheus.until("sum(up) == 4")
        _drive(router, first.process, config)
        # Rates need two scrapes of a series: one of what was just driven, and another one.
        prometheus.until('octavo_router_config_reloads_total{outcome="failed"} > 0')
        prometheus.until("count_over_time(octavo_router_resumes_total[1m]) > 3")
        yield prometheus


def _router_config(first: str, second: str) -> dict[str, Any]:
    return {
        "discovery": {
            "upstreams": [
                {"url": first, "pool": "m", "names": ["m"]},
                {"url": second, "pool": "m", "names": ["m"]},
                {"url": second.replace("127.0.0.1", "localhost"), "pool": "plain",
                 "names": ["plain"], "kind": "openai"},
                {"url": "http://127.0.0.1:9", "pool": "none", "names": ["none"]},
            ]
        },
        "flow": {"hold_timeout_s": 0.2},
    }  # fmt: skip


def _drive(router: RouterProcess, engine: subprocess.Popen[str], config: Path) -> None:
    """Answers, refusals, an engine that dies in the middle, a configuration that is wrong."""

    def ask(model: str, **more: Any) -> dict[str, Any]:
        return {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}],
                **more}  # fmt: skip

    tenant = {"x-llm-d-inference-fairness-id": "team-a"}
    for _ in range(3):
        answer = router.client.post("/v1/chat/completions", json=ask("m"), headers=tenant)
        assert answer.status_code == 200
    assert router.client.post("/v1/chat/completions", json=ask("none")).status_code == 503
    assert router.client.post("/v1/chat/completions", json=ask("other")).status_code == 404
    port = int(str(router.client.base_url).rpartition(":")[2].strip("/"))
    # Sessions fall on both engines; the one that is killed loses some, and the other goes on.
    asyncio.run(_streams_over_a_death(port, ask("m", max_tokens=300), engine))
    config.write_text("routing: {policy: prefix-laod}\n")
    router.signal(signal.SIGHUP)


async def _streams_over_a_death(
    port: int, body: dict[str, Any], engine: subprocess.Popen[str]
) -> None:
    begun: list[int] = []

    def on_text() -> None:
        begun.append(1)
        if len(begun) >= 8 and engine.poll() is None:
            engine.kill()

    reported = await asyncio.gather(
        *(
            stream(port, {**body, "messages": [{"role": "user", "content": f"Number {i}"}]},
                   on_text=on_text)
            for i in range(8)
        )
    )  # fmt: skip
    assert all(one.is_done and not one.errors for one in reported)


def _operator_metrics() -> OperatorMetrics:
    """As after an hour of work, with a fault of each sort."""
    metrics = OperatorMetrics()
    metrics.is_leader, metrics.num_deployments, metrics.num_routers = True, 2, 2
    metrics.num_objects, metrics.watch_age_s = 20, 3.0
    for outcome in (KeyOutcome(), KeyOutcome(is_failed=True)):
        metrics.reconciled(outcome.name, 0.02)
    metrics.calls["apply", "Deployment"] += 3
    metrics.errors["apply", "Conflict"] += 1
    metrics.watch_events["Pod"] += 9
    metrics.router_errors["unreachable"] += 1
    return metrics


@contextmanager
def _serving_metrics(metrics: OperatorMetrics) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = metrics.render().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with handled(Handler) as url:
        yield url


@contextmanager
def booted(
    program: str,
    folder: Path,
    targets: dict[str, str],
    *,
    scrape_s: float = SCRAPE_S,
    rules: dict[str, Any] | None = None,
) -> Iterator[Prometheus]:
    """It scrapes `targets`, URLs by the pod's name, and evaluates `rules`."""
    interval = f"{round(scrape_s * 1000)}ms"
    jobs = [
        {"targets": [url.removeprefix("http://")], "labels": {**LABELS, "pod": pod}}
        for pod, url in targets.items()
    ]
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "octavo", "static_configs": jobs}],
    }
    if rules is not None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        config["rule_files"] = ["rules.yaml"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = _free_port()
    command = [
        program, f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env={**os.environ, "GOGC": "50"}
        )
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        end = time.monotonic() + 30
        while True:
            try:
                if prometheus.client.get("/-/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < end, (folder / "prometheus.log").read_text()
            time.sleep(0.02)  # another process
        yield prometheus
    finally:
        prometheus.client.close()
        process.kill()
        process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
