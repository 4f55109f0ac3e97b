"""Port 8090: is the operator alive, and what has it counted. Plain HTTP/1.1, GET only."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.metrics import OperatorMetrics

logger = logging.getLogger("octavo.operator.health")

MAX_REQUEST_BYTES = 8192
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class OperatorHealth:
    """One look at ourselves."""

    event_age_s: float  # since the last event or list
    max_event_age_s: float
    is_synced: bool
    is_leading: bool
    loop_lag_s: float = 0.0  # of the event loop that is latest
    max_loop_lag_s: float = 20.0
    tried_age_s: float = (
        0.0  # since a list was tried: an API server that does not answer is not our fault
    )

    @property
    def is_alive(self) -> bool:
        return self.tried_age_s <= self.max_event_age_s and self.loop_lag_s <= self.max_loop_lag_s

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.is_synced and self.event_age_s <= self.max_event_age_s


class HealthServer:
    """Answers on the operator's own loop: when that hangs, so does the probe."""

    def __init__(self, look: Callable[[], OperatorHealth], metrics: OperatorMetrics) -> None:
        self._look = look
        self._metrics = metrics

    async def run(self, host: str, port: int) -> None:
        """Until cancelled. Raises OSError where the port is taken."""
        server = await self.start(host, port)
        async with server:
            await server.serve_forever()

    async def start(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            logger.debug("A probe went away")
        finally:
            writer.close()

    def answer(self, head: bytes) -> bytes:
        """The whole response to a request's head."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(405, "text/plain", "only GET\n")
        health = self._look()
        if path == b"/metrics":
            self._metrics.watch_age_s = health.event_age_s
            self._metrics.is_leader = health.is_leading
            return _response(200, "text/plain; version=0.0.4", self._metrics.render())
        if path in (b"/healthz", b"/livez", b"/health"):
            return _json(200 if health.is_alive else 503, health)
        if path in (b"/readyz", b"/ready"):
            return _json(200 if health.is_ready else 503, health)
        return _response(404, "text/plain", "there are /healthz, /readyz and /metrics\n")


def _json(status: int, health: OperatorHealth) -> bytes:
    report = {
        "alive": health.is_alive,
        "synced": health.is_synced,
        "leading": health.is_leading,
        "newsAgeSeconds": round(health.event_age_s, 3),
        "triedAgeSeconds": round(health.tried_age_s, 3),
        "maxNewsAgeSeconds": health.max_event_age_s,
        "loopLagSeconds": round(health.loop_lag_s, 3),
    }
    return _response(status, "application/json", json.dumps(report) + "\n")


def _response(status: int, content_type: str, text: str) -> bytes:
    body = text.encode()
    words = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
    head = (
        f"HTTP/1.1 {status} {words[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
