"""The express lane: requests that nothing happens to pass in native code (csrc/router/express).

    client's bytes ──► Lane.begin ──► engine             a Flight waits for the answer
    client ◄────────── Lane.land  ◄── engine's answer, whole

Both calls do what `Proxy.handle` and `ProxyExchange` do, on the same objects. All else goes the
long way through those: a queue, a key with limits, an engine without an idle connection, any other
policy than prefix-load, each 64th request because it is looked at closely. And a flight to which
something happens (an answer that is a stream or comes in pieces, an error, a client that leaves, a
deadline) becomes the exchange that it would have been, and goes on as one.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from octavo_router.endpoints.registry import Registry
from octavo_router.flow.admission import AdmissionGate, Ticket
from octavo_router.flow.budget import RetryBudget, Throttle
from octavo_router.metrics import RouterMetrics
from octavo_router.observer import MetricsObserver
from octavo_router.proxy.account import RequestAccount
from octavo_router.proxy.exchange import ProxyExchange
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.decision import Decision
from octavo_router.routing.dispatcher import Dispatcher, Lease
from octavo_router.routing.health import EndpointHealth
from octavo_router.routing.models import Models
from octavo_router.routing.request import RouteRequest

if TYPE_CHECKING:
    from types import ModuleType

    from octavo_router._fast import Flight, Lane
    from octavo_router.proxy.head_facts import HeadFacts
    from octavo_router.proxy.interfaces import ProxyParts
    from octavo_router.proxy.service import Proxy

logger = logging.getLogger("octavo.router")


def make_lane(proxy: Proxy, parts: ProxyParts) -> Lane | None:
    """None where the parts are not those that it knows by heart, or it was not built."""
    gate, dispatcher = parts.gate, parts.dispatcher
    if type(gate) is not AdmissionGate or type(dispatcher) is not Dispatcher:
        return None
    if not parts.hot_path.is_native:
        return None
    fast = import_module("octavo_router._fast")
    if not _is_known(parts, gate, dispatcher, fast):
        return None

    def take_over(flight: Flight) -> ProxyExchange:
        return _exchange_of(flight, proxy, gate, dispatcher)

    def broke(flight: Flight, error: Exception) -> None:
        """A mistake of ours: as `ProxyExchange` does it."""
        if not flight.is_over:
            try:
                raise error
            except Exception:
                take_over(flight).broke()
            return
        request_id = flight.record.request_id
        logger.error("Broke on a request", extra={"request_id": request_id}, exc_info=error)
        connection = flight.connection
        if connection.owner is flight:
            connection.owner = None
            connection.abort()

    lane: Lane = fast.Lane(proxy, take_over, broke)
    return lane


def _is_known(
    parts: ProxyParts, gate: AdmissionGate, dispatcher: Dispatcher, fast: ModuleType
) -> bool:
    """Whether what `begin` and `land` repeat is what these would do."""
    throttle = gate.throttle
    return (
        parts.tracing is None
        and type(parts.registry) is Registry
        and type(parts.models) is Models
        and type(parts.budget) is RetryBudget
        and type(parts.metrics) is RouterMetrics
        and type(gate._rooms) is PoolCapacity
        and type(dispatcher.underway) is fast.Underway
        and type(dispatcher._index) is fast.ResidencyIndex
        and type(dispatcher.observer) in (MetricsObserver, type(None))
        and type(dispatcher.health) in (EndpointHealth, type(None))
        and type(throttle) in (Throttle, type(None))
        and dispatcher.on_room == gate.wake
        and dispatcher.on_result == (throttle.note if throttle is not None else None)
    )


def _exchange_of(
    flight: Flight, proxy: Proxy, gate: AdmissionGate, dispatcher: Dispatcher
) -> ProxyExchange:
    """The exchange that has come as far as the flight has, and takes its place everywhere."""
    connection, head, scan, record = flight.connection, flight.head, flight.scan, flight.record
    facts: HeadFacts = head.facts
    request = RouteRequest(
        model=scan.model,
        pool=flight.route.pool,
        revision=flight.route.revision,
        keys=flight.keys,
        prompt_bytes=scan.prompt_bytes,
        prompt_tokens=flight.prompt_tokens,
        max_tokens=scan.max_tokens,
        num_answers=scan.num_answers,
        stream=scan.stream,
        priority=scan.priority,
        tenant=flight.tenant.name,
        session=facts.session or scan.session,
        request_id=record.request_id,
        placed_at=flight.attempt_at,
        names=flight.names,
    )
    account = RequestAccount(record, flight.began_at, flight.total_at)
    account.wants_usage = scan.include_usage
    account.ticket = Ticket(gate, flight.tenant, 0, (request.pool, request.revision))
    account.lines = flight.lines
    account.attempt_at = flight.attempt_at
    account.lease = Lease(
        dispatcher,
        request,
        Decision(flight.endpoint, flight.policy, flight.reason, flight.matched_tokens),
        flight.uncached_tokens,
        flight.generation,
        flight.names,
        flight.is_computing,
    )
    exchange = ProxyExchange(proxy, connection, head, flight.body, flight.path, request, account)
    proxy.exchanges.discard(flight)
    proxy.exchanges.add(exchange)
    upstream = flight.upstream
    if upstream is not None and upstream.user is not flight:
        upstream = None  # it has gone back to its pool, or is lost
    if upstream is not None:
        upstream.user = exchange
    if connection.owner is flight:
        connection.owner = exchange
    memory = proxy.new_memory(wants_usage=scan.include_usage) if flight.asks_tokens else None
    exchange.go_on(upstream, memory)
    return exchange
