"""Health and metrics endpoints of the operator."""

from __future__ import annotations

import asyncio

import pytest

from octavo_operator.health import HealthServer, OperatorHealth
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.process import MAX_LAG_S
from octavo_operator.watch.work_queue import KeyOutcome


class TestHealth:
    def answer(
        self, request: str, *, age_s: float = 1.0, is_synced: bool = True, tried_s: float = 0.0
    ) -> bytes:
        metrics = OperatorMetrics()
        metrics.reconciled(KeyOutcome().name, 0.02)
        look = OperatorHealth(age_s, 100.0, is_synced, is_leading=True, tried_age_s=tried_s)
        return HealthServer(lambda: look, metrics).answer(request.encode())

    @pytest.mark.parametrize(
        ("request_line", "age_s", "is_synced", "status"),
        [
            ("GET /healthz HTTP/1.1\r\n\r\n", 1.0, False, 200),
            ("GET /healthz HTTP/1.1\r\n\r\n", 101.0, True, 200),
            ("GET /readyz HTTP/1.1\r\n\r\n", 101.0, True, 503),
            ("GET /readyz?x=1 HTTP/1.1\r\n\r\n", 1.0, True, 200),
            ("GET /readyz HTTP/1.1\r\n\r\n", 1.0, False, 503),
            ("GET /metrics HTTP/1.1\r\n\r\n", 1.0, True, 200),
            ("POST /healthz HTTP/1.1\r\n\r\n", 1.0, True, 405),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", 1.0, True, 404),
            ("\r\n\r\n", 1.0, True, 405),
        ],
    )
    def test_each_path(self, request_line, age_s, is_synced, status):
        answer = self.answer(request_line, age_s=age_s, is_synced=is_synced)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())

    def test_an_api_server_that_is_away_is_no_reason_to_be_restarted(self):
        """What is learnt would be lost, and the back-off of restarts would outlast the outage."""
        request = "GET /healthz HTTP/1.1\r\n\r\n"
        assert self.answer(request, age_s=9000.0, tried_s=99.0).startswith(b"HTTP/1.1 200 ")
        assert self.answer(request, age_s=9000.0, tried_s=101.0).startswith(b"HTTP/1.1 503 ")

    def test_metrics_are_what_prometheus_reads(self):
        from prometheus_client.parser import text_string_to_metric_families

        body = self.answer("GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2].decode()
        families = {f.name: f for f in text_string_to_metric_families(body)}
        done = [
            s.value
            for s in families["octavo_operator_reconciles"].samples
            if s.labels == {"outcome": "done"}
        ]
        assert done == [1.0]
        assert families["octavo_operator_reconcile_seconds"].type == "histogram"

    def test_over_a_socket(self):
        async def story() -> bytes:
            look = OperatorHealth(1.0, 100.0, is_synced=True, is_leading=False)
            server = await HealthServer(lambda: look, OperatorMetrics()).start("127.0.0.1", 0)
            async with server:
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = await reader.read()
                writer.close()
                return answer

        assert b'"alive": true' in asyncio.run(story())


def test_liveness_fails_when_a_loop_is_twenty_seconds_late():
    def is_alive(lag_s: float) -> bool:
        look = OperatorHealth(1.0, 100.0, True, True, loop_lag_s=lag_s, max_loop_lag_s=MAX_LAG_S)
        return look.is_alive

    assert is_alive(19.9)
    assert not is_alive(20.1)
