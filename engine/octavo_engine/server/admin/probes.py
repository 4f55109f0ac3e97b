"""Health, readiness and metrics. Health means forward progress, not that a process exists.

| state     | /livez | /health, /healthz | /ready, /readyz |
|-----------|--------|-------------------|-----------------|
| loading   | 200    | 503               | 503             |
| ready     | 200    | 200               | 200             |
| saturated | 200    | 200               | 503             |
| stalled   | 503    | 503               | 503             |
| draining  | 200    | 200               | 503             |
| dead      | 503    | 503               | 503             |

Saturated (the queue is full) is not dead: restarting would lose the work. Loading may take long:
/livez stays 200, so that a liveness probe does not kill a server that is on its way. Pictures whose
processes hang count as stalled for the second or two that it takes to replace these; requests are
taken meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.service import Service

ALIVE = frozenset(("loading", "ready", "saturated", "draining"))
HEALTHY = frozenset(("ready", "saturated", "draining"))
READY = frozenset(("ready",))
CLOCK_JUMP = (
    b"octavo-clock-jump"  # header of /health: seconds by which the wall clock was set lately
)


async def livez(exchange: Exchange, service: Service) -> None:
    await _answer(exchange, service, ALIVE)


async def health(exchange: Exchange, service: Service) -> None:
    if _state(service) in HEALTHY:
        headers = []
        if jump_s := service.clock.recent_s:
            headers.append((CLOCK_JUMP, f"{jump_s:.3f}".encode()))
        await exchange.reply(b"", headers=headers)  # clients of vLLM's expect an empty body
    else:
        await _answer(exchange, service, HEALTHY)


async def ready(exchange: Exchange, service: Service) -> None:
    await _answer(exchange, service, READY)


async def metrics(exchange: Exchange, service: Service) -> None:
    text, content_type = service.metrics.render(exchange.header(b"accept"))
    await exchange.reply(text, headers=[(b"content-type", content_type.encode())])


async def _answer(exchange: Exchange, service: Service, good: frozenset[str]) -> None:
    state = _state(service)
    health = service.engine.health()
    body: dict[str, Any] = {"state": state}
    if reason := health.reason or service.media_hang:
        body["reason"] = reason
    if state == "loading":
        body["progress"] = round(health.progress, 4)
        if health.loading is not None:
            body["loading"] = health.loading
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    if state not in good:
        headers.append((b"retry-after", b"1"))
    status = 200 if state in good else 503
    await exchange.reply(msgspec.json.encode(body), status=status, headers=headers)


def _state(service: Service) -> str:
    state: str = service.engine.health().state
    if state == "ready" and service.admission.is_draining:
        return "draining"
    if state == "ready" and service.admission.awaits_adapters:
        return "loading"
    if state == "ready" and service.admission.is_saturated:
        return "saturated"
    if state == "ready" and service.media_hang:
        return "stalled"
    return state
