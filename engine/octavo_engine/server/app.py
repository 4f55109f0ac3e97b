"""The table of routes, and what every request passes on its way: id, key, errors, log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from octavo_engine.errors import RequestError
from octavo_engine.protocol.endpoints import DRAIN_PATH, POD_UID_HEADER, STREAM_PATH
from octavo_engine.server import admin, listing, probes, tokens
from octavo_engine.server.chat import chat_completions
from octavo_engine.server.completions import completions
from octavo_engine.server.exchange import ClientGone, Exchange
from octavo_engine.server.http_errors import from_routing, internal_error
from octavo_engine.server.service import Service
from octavo_engine.server.stream import stream

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo_engine.server.service import ServedEngine
    from octavo_engine.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

Handler = Callable[[Exchange, Service], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One route: who may call it, and whether it brings work."""

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    access: Literal["public", "key"]  # key: only with an API key, where any are set
    works: bool = False  # needs the model; refused while it loads or drains


# /metrics is public because scrapers of clusters send no key; it holds no prompt and no key.
ROUTES = (
    Row("GET", "/v1/models", listing.list_models, "key"),
    Row("GET", "/v1/models/{model:path}", listing.get_model, "key"),
    Row("POST", "/v1/completions", completions, "key", works=True),
    Row("POST", "/v1/chat/completions", chat_completions, "key", works=True),
    Row("POST", "/tokenize", tokens.tokenize, "key", works=True),
    Row("POST", "/detokenize", tokens.detokenize, "key", works=True),
    Row("GET", STREAM_PATH, stream, "key"),
    Row("POST", DRAIN_PATH, admin.drain, "key"),
    Row("GET", "/health", probes.health, "public"),
    Row("GET", "/healthz", probes.health, "public"),
    Row("GET", "/livez", probes.livez, "public"),
    Row("GET", "/ready", probes.ready, "public"),
    Row("GET", "/readyz", probes.ready, "public"),
    Row("GET", "/version", listing.version, "public"),
    Row("GET", "/metrics", probes.metrics, "public"),
)


def build_app(engine: ServedEngine, settings: ServerSettings) -> Starlette:
    """The ASGI application; its Service is `app.state.service`."""
    service = Service(engine, settings)
    app = Starlette(
        routes=[Route(row.path, Endpoint(row, service), methods=[row.method]) for row in ROUTES],
        exception_handlers={HTTPException: _Refusal(service)},  # type: ignore[dict-item]  # its __call__ is one
    )
    app.router.redirect_slashes = False  # a scraper or client follows no redirect
    app.state.service = service
    if settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware  # only where browsers call

        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


class Endpoint:
    """A row of the table as an ASGI application."""

    def __init__(self, row: Row, service: Service) -> None:
        self._row = row
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, row = self._service, self._row
        exchange = Exchange(scope, receive, send, service.settings.limits)
        began_at = time.monotonic()
        service.metrics.http_in_flight += 1
        try:
            service.check_pod(exchange.header(POD_UID_HEADER.encode()))
            if row.access == "key":
                service.keys.check(exchange.header(b"authorization"))
            if row.works:
                await self._work(exchange)
            else:
                await row.handler(exchange, service)
        except RequestError as error:
            if error.status >= 500:
                _log(logging.WARNING, exchange, "Failed a request", error=error.message)
            await exchange.refuse(error)
        except ClientGone:
            exchange.status = 499  # logged and counted only
        except asyncio.CancelledError:
            exchange.status = exchange.status or 499
            raise
        except Exception:  # whatever nobody meant: the client learns that it is our fault, no more
            logger.exception("Broke on a request", extra={"request_id": exchange.request_id})
            await exchange.refuse(internal_error())
        finally:
            service.metrics.http_in_flight -= 1
            service.metrics.count_http(row.path, exchange.status)
            _log_access(exchange, row, service.settings.access_log, began_at)

    async def _work(self, exchange: Exchange) -> None:
        service = self._service
        service.admit()
        service.enter()
        try:
            await self._row.handler(exchange, service)
        finally:
            service.leave()


class _Refusal:
    """Paths and methods that are not in the table, answered in the shape of all other errors."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, request: Request, error: HTTPException) -> ASGIApp:
        return self._answer(error)

    def _answer(self, error: HTTPException) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send, self._service.settings.limits)
            refusal = from_routing(error.status_code)
            for name, value in (error.headers or {}).items():
                refusal.headers += ((name.lower().encode(), value.encode()),)
            self._service.metrics.count_http("other", error.status_code)
            await exchange.refuse(refusal)

        return answer


def _log_access(exchange: Exchange, row: Row, which: str, began_at: float) -> None:
    """A probe that says 503 is no error: it is what it was asked."""
    is_error = exchange.status >= 500 and row.access != "public"
    if which == "none" or (which == "errors" and not is_error):
        return
    _log(logging.INFO, exchange, "Answered", duration_s=round(time.monotonic() - began_at, 6))


def _log(level: int, exchange: Exchange, message: str, **fields: object) -> None:
    scope = exchange.scope
    logger.log(
        level,
        message,
        extra={
            "request_id": exchange.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": exchange.status or None,
            **fields,
        },
    )
