"""The proxy: what becomes of each request, and the parts that exchanges share.

A request is for a proxied path, for one of the router's own routes, or refused. Nothing else gets
through: paths are compared as they were sent, byte for byte.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import EXPLAIN_HEADER, OWNER_HEADER
from octavo_router.errors import Rejected
from octavo_router.flow.budget import Losses
from octavo_router.flow.idempotency import IdempotencyKeys
from octavo_router.flow.quarantine import Quarantine
from octavo_router.metrics.record import RequestRecord
from octavo_router.proxy import continuation
from octavo_router.proxy.account import RequestAccount
from octavo_router.proxy.events import EventRelay
from octavo_router.proxy.exchange import ProxyExchange
from octavo_router.proxy.head_facts import FactReader, HeadFacts
from octavo_router.proxy.local_response import LocalResponse
from octavo_router.proxy.mirror import Mirrors
from octavo_router.proxy.privileged_fields import for_engines
from octavo_router.proxy.response_affinity import ResponseAffinity
from octavo_router.proxy.response_recorder import ResponseRecorder, replay
from octavo_router.proxy.resume import StreamMemory
from octavo_router.residency.api import ScanError
from octavo_router.routing.models import ModelRoute
from octavo_router.routing.request import RouteRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.flow.admission import QueuedRequest
    from octavo_router.flow.idempotency import StoredResponse as KeptAnswer
    from octavo_router.flow.tenant import Tenant
    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.request_head import RequestHead
    from octavo_router.metrics.histogram import Histogram
    from octavo_router.proxy.interfaces import ExchangeHandle, ProxyParts
    from octavo_router.proxy.paths import ProxiedPath
    from octavo_router.proxy.stream_form import StreamForm
    from octavo_router.residency.api import Scan
    from octavo_router.routing.dispatcher import Lease

logger = logging.getLogger("octavo.router")

_QUIET_S: Final = 1.0  # between two complaints about one endpoint


class Proxy:
    """Implements what a `ClientConnection` calls its service. One for each process."""

    __slots__ = (
        "_access_log", "_admin", "_facts", "_gate", "_hot_path", "_id_prefix",
        "_idempotency", "_kept", "_losses", "_max_event_bytes", "_metrics", "_models", "_num_ids",
        "_registry", "_routes", "_scan", "_tracing", "adapters", "budget", "dispatcher",
        "exchanges", "find_usage", "loop", "mirrors", "quarantine", "retry", "timeouts",
        "upstreams",
    )  # fmt: skip

    def __init__(self, parts: ProxyParts) -> None:
        self.loop = parts.loop
        self._registry = parts.registry
        self.dispatcher = parts.dispatcher
        self.adapters = parts.adapters
        self.budget = parts.budget
        self.upstreams = parts.upstreams
        self.exchanges: set[ExchangeHandle] = set()  # under way
        self._losses = Losses(time.monotonic)
        self.quarantine = Quarantine(parts.config.retry, time.monotonic)
        parts.registry.subscribe(self.quarantine.changed)
        self.mirrors = Mirrors(parts.dispatcher, parts.upstreams, self.quarantine)
        self._kept = ResponseAffinity(parts.registry)
        self._idempotency = IdempotencyKeys(parts.config.flow, time.monotonic)
        self._admin = parts.admin
        self._gate = parts.gate
        self._models = parts.models
        self._hot_path = parts.hot_path
        self._scan = parts.hot_path.scan
        self.find_usage = parts.hot_path.find_usage
        self._metrics = parts.metrics
        self._access_log = parts.access_log
        self._tracing = parts.tracing
        self._routes = parts.routes
        self.reconfigure(parts.config)
        self._id_prefix = f"req-{os.urandom(5).hex()}-"
        self._num_ids = 0

    def reconfigure(self, config: RouterConfig) -> None:
        """Requests from now on go by these settings."""
        self.timeouts = config.timeouts
        self._idempotency.config = config.flow
        self.retry = self.budget.config = self.quarantine.config = config.retry
        self._max_event_bytes = config.limits.max_event_bytes
        self._facts = FactReader(config, self._routes)

    # -- as a connection's service

    def new_request_id(self) -> str:
        self._num_ids += 1
        return f"{self._id_prefix}{self._num_ids:x}"

    def check(self, connection: ClientConnection, head: RequestHead) -> None:
        facts: HeadFacts | None = head.facts
        if facts is None or facts.reader is not self._facts:
            facts = head.facts = self._facts.read(head)
        if facts.needs_key:
            connection.context = self._gate.authenticate(head.credentials, facts.tenant_hint)

    def handle(self, connection: ClientConnection, head: RequestHead, body: bytes) -> None:
        facts: HeadFacts = head.facts
        request_id = head.request_id or self.new_request_id()
        path = facts.path
        if facts.needs_key and connection.context.is_revoked:  # while the body arrived
            connection.context = self._gate.authenticate(head.credentials, facts.tenant_hint)
        if path is None:
            assert facts.handler is not None
            LocalResponse(connection, head, request_id).start(facts.handler, body)
            return
        now = time.monotonic()
        tenant: Tenant = connection.context
        record = _record_of(connection, request_id, tenant, facts, body)
        connection.context = record
        request = RouteRequest()
        request.request_id = request_id
        request.tenant = tenant.name
        if facts.explain:
            self._check_explain(connection, head)
            request.explain = True
        seen, body = (None, body) if facts.continues is None else continuation.cut(body, facts)
        key = facts.idempotency_key
        if key and (kept := self._idempotency.find(tenant.name, path.path, key, body)) is not None:
            self._give_again(connection, kept, record)
            return
        sent = body
        scan: Scan | None = None
        if path.is_json:
            scan, body = self._read_body(body, facts, path, tenant, request)
            record.model, record.is_stream = scan.model, scan.stream
        else:
            request.prompt_bytes = len(body)
            request.session = facts.session
        memory = None if seen is None else self._remember(seen, path, request, scan)
        route = self._route(facts, path, request, record)
        if route.is_canary:
            record.model = route.adapter
            if scan is not None:
                contents = {request.model: self._models.adapter_contents[route.adapter]}
                request.keys = self._scan(body, path.kind, contents).keys
        if route.upstream_model and scan is not None and scan.model_end:
            name = json.dumps(route.upstream_model).encode()
            body = b"".join((body[: scan.model_start], name, body[scan.model_end :]))
        total_s, wanted_s = self.timeouts.total_s, facts.timeout_s
        deadline = now + (wanted_s if 0.0 < wanted_s < total_s else total_s)
        entry = self._gate.admit(request, tenant, num_bytes=len(body), deadline=deadline)
        self.budget.begin(request.tenant, now)
        trace = self._tracing.begin(record) if self._tracing is not None else None
        account = RequestAccount(record, now, deadline, trace)
        account.wants_usage = scan is not None and scan.include_usage
        account.is_client_timed = wanted_s > 0.0
        if key:
            run = self._idempotency.begin(tenant.name, path.path, key, sent)
            connection = ResponseRecorder(
                connection, self._idempotency, run, record
            ).as_connection()
        head = _for_engines(head, facts, path, tenant)
        hands_over = path.hands_over and memory is None and self.dispatcher.pairs(request.pool)
        exchange = ProxyExchange(
            self, connection, head, body, path, request, account,
            hands_over=hands_over, memory=memory,
        )  # fmt: skip
        self.exchanges.add(exchange)
        exchange.start(entry)
        if route.copies and memory is None:
            self.mirrors.send(head, body, path.path, request, route.copies, total_s=total_s)

    def _remember(
        self, seen: bytes, path: ProxiedPath, request: RouteRequest, scan: Scan | None
    ) -> StreamMemory:
        """Of a stream that another router may have begun. Raises Rejected."""
        assert path.resumes is not None and scan is not None  # continuation.cut
        memory = self.new_memory(path.resumes, wants_usage=scan.include_usage, keeps_lines=True)
        continuation.remember(memory, seen, is_stream=request.stream)
        return memory

    def _read_body(
        self,
        body: bytes,
        facts: HeadFacts,
        path: ProxiedPath,
        tenant: Tenant,
        request: RouteRequest,
    ) -> tuple[Scan, bytes]:
        """What it says goes into the request; the body as engines get it. Raises Rejected."""
        try:
            adapters = self._models.adapter_contents
            scan = self._scan(body, path.kind, adapters)
            sent, body = body, for_engines(body, scan, tenant.limits, path)
            if body is not sent:
                scan = self._scan(body, path.kind, adapters)
        except ScanError as error:
            raise Rejected(400, "invalid_json", error.message) from None
        request.model = scan.model
        request.take(scan)
        request.session = facts.session or scan.session
        if path.keeps:
            request.subset = self._kept.subset_of(body)
        return scan, body

    def _route(
        self, facts: HeadFacts, path: ProxiedPath, request: RouteRequest, record: RequestRecord
    ) -> ModelRoute:
        """The pool that serves it, also in the request and its record. Raises Rejected."""
        if path.is_kept:
            route = self._way_to(self._kept.keeper(facts.kept_id), request)
            record.model = request.model
        else:
            route = self._models.resolve(
                request.model, request_id=request.request_id, session=request.session
            )
        request.pool, request.revision = route.pool, route.revision
        request.adapter = route.adapter
        if route.adapter and self.adapters is not None:
            self.adapters.note(request)
        record.is_known_model = route.is_known
        record.pool, record.revision = route.pool, route.revision
        record.trial = route.adapter if route.is_trial else ""
        return route

    def refused(self, connection: ClientConnection, error: Rejected, request_id: str) -> None:
        """A request that never became an exchange."""
        record = connection.context
        if type(record) is not RequestRecord:
            record, head = RequestRecord(), connection.head
            if head is not None:
                record.method = head.method
                facts: HeadFacts | None = head.facts
                record.route = facts.route if facts is not None else "other"
        record.request_id = request_id  # as the client got it
        record.status, record.code, record.outcome = error.status, error.code, "refused"
        self._report(record, connection)

    def _check_explain(self, connection: ClientConnection, head: RequestHead) -> None:
        """What the router knows of an engine's cache is others' prompts. Raises Rejected.

        Refused rather than passed over: who asks for it would wonder.
        """
        if not self._admin.allows_fields(connection.client, head.fields):
            raise self._admin.refusal(EXPLAIN_HEADER)

    # -- for exchanges

    def over(self, exchange: ExchangeHandle, account: RequestAccount) -> None:
        self.exchanges.discard(exchange)
        self.budget.end(num_repeats=account.num_repeats)
        record = account.record
        self._metrics.finish(record)
        log = self._access_log
        if log is not None and (log.takes_all or record.outcome != "ok"):
            log.write(record)

    def note_loss(self, lease: Lease | None, problem: str) -> None:
        """An engine failed. Said once a second for each, however many requests it costs."""
        upstream = self.upstreams.known(lease.endpoint) if lease is not None else None
        if lease is None or upstream is None:  # who was taken out of service may well end
            return
        upstream.num_losses += 1
        now = time.monotonic()
        if now < upstream.quiet_until:
            return
        logger.warning(
            "Lost attempts",
            extra={
                "endpoint": upstream.lines.authority,
                "attempts": upstream.num_losses,
                "request_id": lease.request.request_id,
                "problem": problem,
            },
        )
        upstream.num_losses, upstream.quiet_until = 0, now + _QUIET_S

    def note_stranger(self, lease: Lease | None) -> None:
        """Another pod answered: nothing goes there until the one that was meant speaks again."""
        if lease is not None and lease.endpoint.spec.pod_uid:
            self._registry.report(lease.endpoint, "down", "another pod answers at its address")

    def is_end_of(self, lease: Lease | None) -> bool:
        """A loss that belongs to an engine's end: it takes no budget, see flow.budget.Losses."""
        if lease is None:
            return False
        endpoint = lease.endpoint
        return self._losses.covers(endpoint.id, endpoint.epoch, endpoint.num_requests)

    def note_quarantine(self, request: RouteRequest, path: str, digest: str) -> None:
        """Two engines died of it."""
        self._metrics.pool(request.pool).quarantined += 1
        logger.error(
            "Refuses a request from now on: engines died of it",
            extra={
                "request_id": request.request_id,
                "pool": request.pool,
                "path": path,
                "digest": digest,
                "seconds": self.quarantine.config.quarantine_s,
            },
        )

    def others(self, request: RouteRequest, ids: Collection[str]) -> list[Endpoint]:
        """Those of its pool that are none of these; nobody where only they are left."""
        candidates = self._registry.candidates(request.pool, request.revision).endpoints
        others = [one for one in candidates if one.spec.id not in ids]
        return [] if ids and len(others) == len(candidates) else others

    def hold(
        self, request: RouteRequest, account: RequestAccount, *, num_bytes: int
    ) -> QueuedRequest | None:
        """A place in the queue of a pool that has lost its last engine; another may come."""
        ticket = account.ticket
        if ticket is None or self._registry.candidates(request.pool, request.revision).endpoints:
            return None
        try:
            waiting = self._gate.wait_again(
                request, ticket, num_bytes=num_bytes, deadline=account.total_at
            )
        except Rejected:  # too many wait already
            return None
        account.ticket = None  # it is the place's now, and comes back with the turn
        return waiting

    def count_prompt(self, pool: str, outcome: str) -> None:
        """Of a request that another engine was to answer."""
        self._metrics.pool(pool).prompts.add(outcome)

    def inter_token_latency(self, pool: str) -> Histogram:
        return self._metrics.pool(pool).itl

    def new_memory(
        self, form: StreamForm, *, wants_usage: bool, keeps_lines: bool = False
    ) -> StreamMemory:
        return StreamMemory(
            self._hot_path.split_token_lines,
            self._hot_path.find_event_end,
            form=form,
            wants_usage=wants_usage,
            max_event_bytes=self._max_event_bytes,
            keeps_lines=keeps_lines,
        )

    def new_relay(self) -> EventRelay:
        return EventRelay(self._hot_path.find_event_end, max_bytes=self._max_event_bytes)

    def first_token_s(self, request: RouteRequest) -> float:
        """How long an engine may take for a prompt: to the first byte of a stream."""
        timeouts = self.timeouts
        return timeouts.first_token_s + timeouts.first_token_per_1k_s * (
            request.prompt_tokens / 1000.0
        )

    def passed_over(
        self, request: RouteRequest, tried: list[Endpoint], *, was_answered: bool
    ) -> tuple[list[Endpoint], bool]:
        """Which endpoints a repeated request does not try, and whether only those are left."""
        candidates = self._registry.candidates(request.pool, request.revision).endpoints
        if subset := request.subset:
            candidates = [one for one in candidates if one.spec.address.authority in subset]
        # Another kind of engine would begin anew what the client has seen a part of.
        unfit = [one for one in candidates if was_answered and one.kind != "octavo"]
        others = [one for one in candidates if one not in tried and one not in unfit]
        if others:
            return [*tried, *unfit], False
        return unfit, True  # better the same again than nobody

    def _way_to(self, endpoint: Endpoint, request: RouteRequest) -> ModelRoute:
        """To one engine, by what it keeps."""
        request.model = next(iter(endpoint.names), "")
        request.subset = (endpoint.spec.address.authority,)
        return ModelRoute(endpoint.pool)

    def progress(self, pool: str, waited_s: float) -> str:
        """How it stands with a pool, for a client that waits."""
        members = self._registry.pool(pool)
        ready = sum(endpoint.state == "ready" for endpoint in members)
        return f"waiting for {pool}: {ready} of {len(members)} engines ready, {waited_s:.0f} s"

    def _give_again(
        self, connection: ClientConnection, kept: KeptAnswer, record: RequestRecord
    ) -> None:
        """Nothing runs for it, and nobody is charged."""
        record.model, record.is_known_model = kept.model, True
        record.status, record.outcome = kept.status, "ok"
        record.response_bytes = len(kept.body)
        replay(connection, kept, record.request_id)
        self._report(record, connection)

    def _report(self, record: RequestRecord, connection: ClientConnection) -> None:
        self._metrics.finish(record)
        if self._access_log is not None:
            record.client = connection.client
            self._access_log.write(record)


def _record_of(
    connection: ClientConnection, request_id: str, tenant: Tenant, facts: HeadFacts, body: bytes
) -> RequestRecord:
    """What is known of a request before its body is read."""
    assert facts.path is not None
    record = RequestRecord()
    record.request_id = request_id
    record.route = facts.path.path
    record.tenant = tenant.name
    record.client = connection.client
    record.request_bytes = len(body)
    record.traceparent = facts.traceparent
    return record


def _for_engines(
    head: RequestHead, facts: HeadFacts, path: ProxiedPath, tenant: Tenant
) -> RequestHead:
    """With what an engine is to know of the client."""
    limits = tenant.limits
    if limits.owner and (path.keeps or path.is_kept or path.salts):
        head = head.with_lines(f"{OWNER_HEADER}: {limits.owner}\r\n".encode())
    if facts.trusted_lines and limits.is_trusted:
        head = head.with_lines(facts.trusted_lines)
    return head
