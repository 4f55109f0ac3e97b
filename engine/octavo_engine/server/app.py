"""The application over the table of routes: what every request passes, from id to log."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from octavo_common import failpoints
from octavo_common.logs import REQUEST_ID
from octavo_engine.core.data_parallel.chosen_rank import CHOSEN_RANK
from octavo_engine.errors import RequestError, machine_fault
from octavo_engine.protocol.endpoints import POD_UID_HEADER
from octavo_engine.server.compat.data_parallel_rank import read_rank
from octavo_engine.server.docs.openapi import document
from octavo_engine.server.http.disconnect import ClientGone
from octavo_engine.server.http.errors import HttpError, from_routing, machine_error
from octavo_engine.server.http.exchange import Exchange
from octavo_engine.server.memory import LARGE_BODY_BYTES
from octavo_engine.server.openai.batches.runner import BatchRunner
from octavo_engine.server.openai.batches.shelf import FileStore
from octavo_engine.server.routes import is_for_administrators, served_routes
from octavo_engine.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo_engine.server.admin.reload import KeyFiles
    from octavo_engine.server.routes import Handler, Row
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.tracing import EngineTrace, EngineTracing

logger = logging.getLogger("octavo.server")


def build_app(
    engine: ServedEngine,
    settings: ServerSettings,
    key_files: KeyFiles | None = None,
    tracing: EngineTracing | None = None,
    shelf: FileStore | None = None,
) -> Starlette:
    """The ASGI application; its Service is `app.state.service`."""
    service = Service(engine, settings, key_files)
    service.tracing = tracing
    rows = served_routes(settings)
    if settings.files_dir:
        shelf = shelf or FileStore(settings.files_dir, settings.limits)
        inside = Inside({row.path: EndpointHandler(row, service, guarded=False) for row in rows})
        service.batches = BatchRunner(shelf, inside, settings.limits, settings.batch_concurrency)
    elsewhere = [row for row in rows if settings.admin_port and is_for_administrators(row)]
    described = [row for row in rows if row not in elsewhere]
    service.describe = cache(
        lambda: msgspec.json.encode(document(described, root_path=settings.root_path))
    )
    moved = [replace(row, handler=_refuse_here, works=False) for row in elsewhere]
    app = _application([*described, *moved], service)
    if settings.allowed_origins:
        from octavo_engine.server.http.cors import allow_origins  # only where browsers call

        allow_origins(app, settings)
    return app


def build_admin_app(service: Service) -> Starlette:
    """What the administrators' listener serves: their routes, probes and metrics, no pages."""
    rows = [
        replace(row, handler=_refusing_pages(row.handler))
        for row in served_routes(service.settings)
        if is_for_administrators(row) or (row.access == "public" and not row.needs)
    ]
    return _application(rows, service)


def _application(rows: Sequence[Row], service: Service) -> Starlette:
    app = _App(
        routes=[
            Route(row.path, EndpointHandler(row, service), methods=[row.method]) for row in rows
        ],
        exception_handlers={HTTPException: _Refusal(service)},  # type: ignore[dict-item]  # its __call__ is one
    )
    app.router.redirect_slashes = False  # a scraper or client follows no redirect
    app.state.service = service
    return app


async def _refuse_here(exchange: Exchange, service: Service) -> None:
    raise HttpError(
        404,
        f"{exchange.scope['path']} answers on the administrators' listener only, port "
        f"{service.settings.admin_port} (--admin-port).",
        code="route_not_found",
    )


def _refusing_pages(handler: Handler) -> Handler:
    """A page that a browser shows must not administrate what runs on the same machine."""

    async def handle(exchange: Exchange, service: Service) -> None:
        if b"origin" in exchange.headers:
            raise HttpError(
                403,
                "The administrators' listener does not accept requests from browser pages.",
                code="page_refused",
            )
        await handler(exchange, service)

    return handle


class _App(Starlette):
    """Fixed paths are found in a table; others, and all where there is middleware, by Starlette."""

    _table: dict[tuple[str, str], ASGIApp] | None = None  # made at the first call: all is added

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        table = self._table
        if table is None:
            table = self._table = self._fixed()
        endpoint = table.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)

    def _fixed(self) -> dict[tuple[str, str], ASGIApp]:
        if self.user_middleware:
            return {}
        return {
            (method, route.path): route.app
            for route in self.routes
            if isinstance(route, Route) and "{" not in route.path
            for method in route.methods or ()
        }


class Inside:
    """The routes for requests of our own making; for no path that comes from outside."""

    def __init__(self, endpoints: Mapping[str, ASGIApp]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoints[scope["path"]](scope, receive, send)


class EndpointHandler:
    """A row of the table as an ASGI application."""

    def __init__(self, row: Row, service: Service, *, guarded: bool = True) -> None:
        self._row = row
        self._service = service
        self._asks_who = guarded and row.access != "public"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, row = self._service, self._row
        exchange = Exchange(scope, receive, send, service.settings.limits)
        began_at = time.monotonic()
        REQUEST_ID.set(exchange.request_id)
        trace = None
        if service.tracing is not None and row.works:
            parent = exchange.header(b"traceparent")
            trace = service.tracing.begin(row.method, row.path, traceparent=parent)
        failure = ""
        service.metrics.http_in_flight += 1
        try:
            service.admission.check_pod(exchange.header(POD_UID_HEADER.encode()))
            if self._asks_who:
                service.client_names.check(exchange.peer_certificate)
                service.guard.check(
                    row.access, exchange.header(b"authorization"), exchange.header(b"x-api-key")
                )
            if row.works:
                await self._work(exchange)
            else:
                await row.handler(exchange, service)
        except RequestError as error:
            failure = (error.code or error.type) if error.status >= 500 else ""
            if error.status >= 500 and error.status != 501:
                _log(logging.WARNING, exchange, "Failed a request", error=error.message)
            await exchange.refuse(error)
        except ClientGone:
            exchange.status = 499  # logged and counted only
            failure = "client_gone"
        except asyncio.CancelledError:
            exchange.status = exchange.status or 499
            raise
        except Exception as error:  # unexpected: the client only learns that the fault is ours
            answer = machine_error(error)
            failure = answer.code or answer.type
            if problem := machine_fault(error):
                _log(logging.ERROR, exchange, "Failed a request", error=problem)
            else:
                logger.exception("Unhandled error in request")
            await exchange.refuse(answer)
        finally:
            service.metrics.http_in_flight -= 1
            if exchange.num_body_bytes > LARGE_BODY_BYTES:
                service.memory.release_soon()
            service.metrics.count_http(row.path, exchange.status)
            if trace is not None:
                _finish_trace(trace, exchange, service, failure)
            _log_access(exchange, row, service.settings.access_log, began_at)

    async def _work(self, exchange: Exchange) -> None:
        service = self._service
        CHOSEN_RANK.set(read_rank(exchange, service.engine.config.data_parallel_size))
        if service.pause.is_on:
            await service.pause.hold(exchange)
        exchange.time_left_s(service.settings.request_timeout_s)  # of every route, before its work
        service.admission.admit()
        service.admission.enter()
        try:
            if failpoints.IS_ON:
                failpoints.hit("server.request")
            await self._row.handler(exchange, service)
        finally:
            service.admission.leave()


class _Refusal:
    """Paths and methods that are not in the table, answered in the shape of all other errors."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, request: Request, error: HTTPException) -> ASGIApp:
        return self._answer(error)

    def _answer(self, error: HTTPException) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send, self._service.settings.limits)
            refusal = from_routing(error.status_code, scope["method"], scope["path"])
            for name, value in (error.headers or {}).items():
                refusal.headers += ((name.lower().encode(), value.encode()),)
            self._service.metrics.count_http("other", error.status_code)
            await exchange.refuse(refusal)

        return answer


def _finish_trace(trace: EngineTrace, exchange: Exchange, service: Service, failure: str) -> None:
    fields = exchange.fields if isinstance(exchange.fields, dict) else {}
    model, served = fields.get("model"), service.model.names[0]
    trace.finish(
        exchange.status,
        {
            "http.request.method": exchange.scope["method"],
            "gen_ai.request.model": model[:256] if isinstance(model, str) else served,
            "gen_ai.response.model": served,
            "octavo.request_id": exchange.request_id,
            "octavo.stream": fields.get("stream") is True,
        },
        failure,
    )


def _log_access(exchange: Exchange, row: Row, which: str, began_at: float) -> None:
    """A probe that says 503 is not an error."""
    is_request = row.access != "public"
    is_error = exchange.status >= 500 and is_request
    is_logged = {"all": True, "requests": is_request, "none": False}.get(which, is_error)
    if not is_logged:
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
