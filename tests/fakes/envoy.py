"""A scripted Envoy: the gateway's side of ext_proc, over real gRPC, and a picker for it to talk to.

It writes requests and reads answers with nothing of the router's but the wire primitives; golden
bytes, made with published bindings of Envoy's API, hold both sides to the true format.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from octavo_router.adapters.fleet import AdapterFleet
from octavo_router.config.settings import EppConfig, RouterConfig
from octavo_router.endpoints.registry import Registry
from octavo_router.epp.picker import PickerParts
from octavo_router.epp.server import PROCESS, EppServer
from octavo_router.epp.structs import read_struct
from octavo_router.epp.wire import blob, blobs, fields, number_field
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionGate
from octavo_router.flow.keys import KeyTable
from octavo_router.flow.quarantine import Quarantine
from octavo_router.metrics import RouterMetrics
from octavo_router.residency import native
from octavo_router.routing.build import build_dispatcher
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.models import Models
from tests.fakes.adapter_calls import HeldCalls
from tests.fakes.endpoints import FakeIndex, make_spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.observer import MetricsObserver

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX, GRPC = range(6)

DESTINATION = "x-gateway-destination-endpoint"
POST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


# -- what Envoy sends


def header_map(headers: dict[str, str]) -> bytes:
    return b"".join(
        blob(1, blob(1, name.encode()) + blob(3, value.encode())) for name, value in headers.items()
    )


def headers_message(
    kind: int,
    headers: dict[str, str],
    *,
    is_end: bool = False,
    metadata: dict[str, Any] | None = None,
    modes: tuple[int, int] | None = None,
    details: str = "",
) -> bytes:
    message = blob(kind, blob(1, header_map(headers)) + number_field(3, is_end))
    if metadata is not None:
        message += blob(8, filter_metadata(metadata))
    if details:
        attributes = struct_of({"response.code_details": details})
        message += blob(9, blob(1, b"envoy.filters.http.ext_proc") + blob(2, attributes))
    if modes is not None:
        message += blob(11, number_field(1, modes[0]) + number_field(2, modes[1]))
    return message


def filter_metadata(metadata: dict[str, Any]) -> bytes:
    return b"".join(
        blob(1, blob(1, name.encode()) + blob(2, struct_of(value)))
        for name, value in metadata.items()
    )


def struct_of(values: dict[str, Any]) -> bytes:
    """A Struct whose values are text or lists of text."""
    parts = []
    for name, value in values.items():
        if isinstance(value, str):
            content = blob(3, value.encode())
        else:
            content = blob(6, b"".join(blob(1, blob(3, item.encode())) for item in value))
        parts.append(blob(1, blob(1, name.encode()) + blob(2, content)))
    return b"".join(parts)


def body_message(kind: int, body: bytes, *, is_end: bool) -> bytes:
    return blob(kind, (blob(1, body) if body else b"") + number_field(2, is_end))


# -- what it receives


@dataclass
class Answer:
    """A ProcessingResponse, read."""

    kind: int = 0  # as in answers: 1 request headers … 6 response trailers, 7 immediate
    set_headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes | None = None  # in place of the gateway's
    streamed: bytes | None = None
    is_end: bool = False
    status: int = 0
    details: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    mode_override: dict[int, int] | None = None
    more_time_s: int = 0
    clears_route_cache: bool = False

    @property
    def destinations(self) -> list[str]:
        """Header and metadata must say the same."""
        header = self.set_headers[DESTINATION]
        assert self.metadata["envoy.lb"][DESTINATION] == header
        return header.split(",")


def read_answer(data: bytes) -> Answer:
    answer = Answer()
    for number, _, value, content in fields(data):
        if number in (1, 2, 3, 4):
            answer.kind = number
            for common in blobs(content, 1):
                _read_common(answer, common)
        elif number in (5, 6):
            answer.kind = number
        elif number == 7:
            answer.kind = 7
            _read_immediate(answer, content)
        elif number == 8:
            answer.metadata = read_struct(content)
        elif number == 9:
            answer.mode_override = {n: v for n, _, v, _ in fields(content)}
        elif number == 10:
            answer.more_time_s = next(v for n, _, v, _ in fields(content) if n == 1)
        else:
            raise AssertionError(f"field {number} = {value}")
    return answer


def _read_common(answer: Answer, data: bytes) -> None:
    for number, _, value, content in fields(data):
        if number == 2:
            _read_mutation(answer, content)
        elif number == 3:
            for kind, _, _, part in fields(content):
                if kind == 1:
                    answer.body = part
                elif kind == 3:
                    answer.streamed = b""
                    for place, _, flag, piece in fields(part):
                        if place == 1:
                            answer.streamed = piece
                        elif place == 2:
                            answer.is_end = bool(flag)
        elif number == 5:
            answer.clears_route_cache = bool(value)
        else:
            raise AssertionError(f"field {number} of a CommonResponse")


def _read_mutation(answer: Answer, data: bytes) -> None:
    for number, _, _, content in fields(data):
        if number == 2:
            answer.removed.append(content.decode())
            continue
        action = pair = None
        for place, _, value, part in fields(content):
            if place == 1:
                pair = {n: c.decode() for n, _, _, c in fields(part)}
            elif place == 3:
                action = value
        assert pair is not None
        assert action == 2, "overwrites"
        answer.set_headers[pair[1]] = pair[3]


def _read_immediate(answer: Answer, data: bytes) -> None:
    for number, _, _, content in fields(data):
        if number == 1:
            answer.status = next(v for n, _, v, _ in fields(content) if n == 1)
        elif number == 2:
            _read_mutation(answer, content)
        elif number == 3:
            answer.body = content
        elif number == 5:
            answer.details = content.decode()


# -- a picker, and a gateway in front of it


class Records:
    takes_all = True

    def __init__(self) -> None:
        self.all: list[RequestRecord] = []

    def write(self, record: RequestRecord) -> None:
        self.all.append(record)


class Leases:
    """Sees each lease end."""

    def __init__(self) -> None:
        self.results: list[tuple[str, str]] = []
        self.outcomes: list[Any] = []

    def placed(self, request: object, decision: object) -> None:
        pass

    def finished(self, lease: Any, outcome: Any) -> None:
        self.results.append((lease.endpoint.id, outcome.result.value))
        self.outcomes.append(outcome)


@dataclass
class PickerRig:
    """What a test looks at."""

    registry: Registry
    index: FakeIndex
    gate: AdmissionGate
    metrics: RouterMetrics
    records: list[RequestRecord]
    leases: Leases
    server: EppServer
    channel: grpc.aio.Channel
    quarantined: list[tuple[str, str]]  # paths and digests
    adapter_calls: HeldCalls
    is_ready: bool = True
    calls: list[Any] = field(default_factory=list)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self.registry.endpoints.values())

    def add(self, *specs: Any) -> list[Endpoint]:
        before = [endpoint.spec for endpoint in self.endpoints]
        added = self.registry.replace("test", [*before, *specs]).added
        for endpoint in added:
            endpoint.max_num_seqs = 64
            self.registry.report(endpoint, "ready")
        return added

    def open(self) -> Gateway:
        call = self.channel.stream_stream(PROCESS)()
        self.calls.append(call)
        return Gateway(call)

    async def settled(self) -> None:
        """Nothing is left of any request."""
        async with asyncio.timeout(5.0):
            while any(endpoint.in_flight for endpoint in self.endpoints) or any(  # noqa: ASYNC110
                tenant.in_flight for tenant in self.gate.tenants._anonymous.values()
            ):  # a request that waits for its adapter is at no endpoint yet
                await asyncio.sleep(0.001)
        for endpoint in self.endpoints:
            assert endpoint.pending_tokens == 0, endpoint
        for tenant in self.gate.tenants._anonymous.values():
            assert tenant.in_flight == 0, tenant.name

    async def until(self, fact: Any) -> None:
        async with asyncio.timeout(5.0):
            while not fact():  # noqa: ASYNC110  # facts have no events
                await asyncio.sleep(0.001)


class Gateway:
    """One HTTP request through Envoy's filter."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.leave()

    async def send(self, message: bytes) -> None:
        await self.call.write(message)

    async def answer(self) -> Answer:
        data = await self.call.read()
        assert data is not grpc.aio.EOF, "the picker ended the stream"
        return read_answer(data)

    async def ask(self, message: bytes) -> Answer:
        await self.send(message)
        return await self.answer()

    async def leave(self) -> None:
        """As Envoy does when the request is over, or its client is gone."""
        try:
            await self.call.done_writing()
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            # What grpc makes of a message that is sent just as the other side ends the stream.
            if error.details() != "Internal error from Core":
                raise

    # whole phases

    async def post(
        self,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        pieces: Sequence[int] = (),
        metadata: dict[str, Any] | None = None,
        modes: tuple[int, int] | None = (DUPLEX, DUPLEX),
    ) -> Answer:
        """Headers and body in full duplex. What is answered first."""
        await self.send(headers_message(2, POST | (headers or {}), metadata=metadata, modes=modes))
        at = 0
        for stop in (*pieces, len(body)):
            await self.send(body_message(4, body[at:stop], is_end=stop == len(body)))
            at = stop
        return await self.answer()

    async def body(self) -> bytes:
        """What an engine gets, behind a first answer."""
        found = b""
        while True:
            piece = await self.answer()
            assert piece.kind == 3
            assert piece.streamed is not None
            found += piece.streamed
            if piece.is_end:
                return found

    async def response(
        self,
        pieces: Iterable[bytes],
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> tuple[Answer, bytes]:
        """An engine's whole answer in full duplex: the reply to its head, and its body after."""
        given = {":status": str(status)} | (headers or {})
        head = await self.ask(headers_message(3, given, metadata=metadata))
        assert head.kind == 2
        found = b""
        parts = list(pieces)
        for number, piece in enumerate(parts, start=1):
            answer = await self.ask(body_message(5, piece, is_end=number == len(parts)))
            assert answer.kind == 4
            found += answer.streamed or b""
            assert answer.is_end == (number == len(parts))
        return head, found


@asynccontextmanager
async def picking(
    num_endpoints: int = 2,
    *,
    config: RouterConfig | None = None,
    table: KeyTable | None = None,
    observer: MetricsObserver | None = None,
    **epp: Any,
) -> AsyncIterator[PickerRig]:
    """A picker for `model` on these endpoints, with its port open and a gateway connected."""
    config = config or RouterConfig()
    server = replace(config.server, host="127.0.0.1", drain_timeout_s=0.2)
    config = replace(config, server=server, epp=EppConfig(enabled=True, port=0, **epp))
    index = FakeIndex()
    registry = Registry(index)
    leases = Leases()
    clock = time.monotonic
    dispatcher = build_dispatcher(
        config, registry, index, clock=clock, rng=Random(1), observer=observer or leases
    )
    gate = AdmissionGate(
        config.flow, table or KeyTable({}), PoolCapacity(registry, config.flow), clock
    )
    dispatcher.on_room = gate.wake
    metrics, records = RouterMetrics(), Records()
    quarantine = Quarantine(config.retry, clock)
    registry.subscribe(quarantine.changed)
    quarantined: list[tuple[str, str]] = []
    adapter_calls = HeldCalls()
    adapters = adapter_calls.fleet = AdapterFleet(registry, adapter_calls, clock=clock)
    adapters.configure(config.routing.pools)
    epp_server = EppServer(
        PickerParts(
            admin=AdminAccess(is_trusted=gate.tenants.is_trusted),
            settings=lambda: config,
            registry=registry,
            dispatcher=dispatcher,
            gate=gate,
            models=Models(registry, config.models, config.routing.pools),
            adapters=adapters,
            scan=native.load().scan,
            metrics=metrics,
            access_log=records,
            is_ready=lambda: rig.is_ready,
            quarantine=quarantine,
            note_quarantine=lambda _, path, digest: quarantined.append((path, digest)),
        )
    )
    async with (
        epp_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{epp_server.port}") as channel,
    ):
        rig = PickerRig(
            registry,
            index,
            gate,
            metrics,
            records.all,
            leases,
            epp_server,
            channel,
            quarantined,
            adapter_calls,
        )
        rig.add(*(make_spec(number, kind="octavo") for number in range(num_endpoints)))
        try:
            yield rig
        finally:
            # gRPC has one queue for all loops: what is left of this one's would meet the next's.
            for call in rig.calls:
                call.cancel()
            await asyncio.gather(*(call.code() for call in rig.calls))
