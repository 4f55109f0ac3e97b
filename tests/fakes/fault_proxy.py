"""Between the operator and a real API server: loses, delays, repeats and breaks what passes.

Plain HTTP on our side, TLS on the server's. Each call is numbered. A test sets `on_call`, called
before each call, and `on_event`, called for each line of a watch; what they return is what happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from aiohttp import web

from octavo_operator.cluster.kube_config import KubeConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.apiserver import ApiServer


@dataclass(frozen=True)
class ApiCall:
    """One request. `number` counts all but watches."""

    number: int
    method: str
    path: str
    query: str

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.query

    @property
    def is_write(self) -> bool:
        return self.method != "GET"


@dataclass(frozen=True)
class Answer:
    """Instead of the server's."""

    status: int
    message: str = "injected"
    retry_after: str = ""


@dataclass(frozen=True)
class Wait:
    """Before the call goes on."""

    seconds: float


class CutBefore:
    """RST; the server never hears of the call."""


class CutAfter:
    """The server does what was requested, and the answer is lost."""


Fault = Answer | Wait | CutBefore | CutAfter | None
Event = dict[str, Any]
# Lines to hand on, each after so many seconds; [] loses the event.
Lines = list[tuple[float, Event]]


class FaultProxy:
    """Use as `async with`; `config` is what an operator logs in with."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watches: dict[int, web.Request] = {}
        self._port = 0
        self.calls: list[ApiCall] = []
        self.num_events = 0
        self.on_call: Callable[[ApiCall], Fault] = lambda call: None
        self.on_event: Callable[[Event], Lines] = lambda event: [(0.0, event)]
        self.is_frozen = False  # watches stay open and tell nothing
        self.is_dead = False  # whoever asks is cut off: a killed client has no further calls

    @property
    def config(self) -> KubeConfig:
        return KubeConfig(server=f"http://127.0.0.1:{self._port}", token=self._server.token)

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cafile=str(self._server.ca_file))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut_watches()
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    def cut_watches(self) -> None:
        """RST on every open stream."""
        for request in [*self._watches.values()]:
            _reset(request)

    # --- one request ----------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = ApiCall(
            len(self.calls) + 1, request.method, request.path, request.rel_url.query_string
        )
        if not call.is_watch:
            self.calls.append(call)
        if self.is_dead:
            return _cut(request)
        fault = self.on_call(call)
        if isinstance(fault, CutBefore):
            return _cut(request)
        if isinstance(fault, Answer):
            return _status(fault)
        if isinstance(fault, Wait):
            await asyncio.sleep(fault.seconds)
        body = await request.read()
        assert self._session is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() in ("authorization", "content-type", "accept")
        }
        try:
            async with self._session.request(
                request.method,
                self._server.url + str(request.rel_url),
                data=body or None,
                headers=headers,
            ) as answer:
                if call.is_watch and answer.status == 200:
                    return await self._stream(request, answer)
                content = await answer.read()
        except aiohttp.ClientError:  # the server is away
            return _cut(request)
        if isinstance(fault, CutAfter) or self.is_dead:
            return _cut(request)
        return web.Response(
            status=answer.status,
            body=content,
            headers={"Content-Type": answer.headers.get("Content-Type", "application/json")},
        )

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches[id(request)] = request
        late: set[asyncio.Task[None]] = set()
        try:
            async for line in answer.content:
                if self.is_frozen:
                    continue
                self.num_events += 1
                for delay_s, event in self.on_event(json.loads(line)):
                    text = json.dumps(event).encode() + b"\n"
                    if delay_s:
                        late.add(asyncio.create_task(_write_later(response, text, delay_s)))
                    else:
                        await response.write(text)
        except (aiohttp.ClientError, ConnectionError):
            _reset(request)
        finally:
            self._watches.pop(id(request), None)
            for task in late:
                task.cancel()
        return response


async def _write_later(response: web.StreamResponse, text: bytes, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    with contextlib.suppress(ConnectionError):
        await response.write(text)


def _status(fault: Answer) -> web.Response:
    reported = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": fault.message,
        "code": fault.status,
    }
    headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
    return web.json_response(reported, status=fault.status, headers=headers)


def _cut(request: web.Request) -> web.StreamResponse:
    _reset(request)
    return web.Response(status=500)  # goes nowhere


def _reset(request: web.Request) -> None:
    transport = request.transport
    if transport is None:
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)  # close without a farewell: RST
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def gone() -> Event:
    """What a watch tells within a 200 when its version is too old."""
    status = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired",
              "message": "too old resource version"}  # fmt: skip
    return {"type": "ERROR", "object": status}
