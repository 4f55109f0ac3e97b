"""The gate: whose request this is, whether it may come in, and whether it must wait first.

    tenant = gate.authenticate(authorization)               Refused 401
    entry = gate.admit(request, tenant, num_bytes=...)      Refused 403, 429, 503
    if not isinstance(entry, Ticket):
        entry = await entry                                 Refused 503, 504; cancel() to leave
    lease = dispatcher.place(request)                       before the next await
    ...
    entry.release(prompt_tokens, output_tokens)             in a finally; the first call counts

A pool with room lets everybody pass. A full one, or one without any engine, makes requests wait in
its queue, which is bounded by count, bytes and age. Who could not be served in time is
refused at once (`octavo_engine.protocol.admission`). Belongs to the event loop; `tick` wants to be
called a few times a second.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from octavo_engine.protocol.admission import MAX_RETRY_AFTER_S, Forecast, retry_after_s
from octavo_router.errors import Rejected
from octavo_router.flow.memory import Level
from octavo_router.flow.queue import PoolQueue, QueueEntry
from octavo_router.flow.tenant import Tenant, Tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from octavo_router.config.settings import FlowConfig
    from octavo_router.flow.budget import Throttle
    from octavo_router.flow.keys import KeyTable
    from octavo_router.routing.request import RouteRequest

Ending = Literal["", "whole", "left"]  # of an answer: broken off, at its end, by its client


class CapacityView(Protocol):
    """How much room pools have; routing.rooms."""

    def has_room(self, pool: str, revision: str) -> bool:
        """It would take one more request. Hot path."""

    def room(self, pool: str, revision: str) -> int:
        """Requests that it would take now."""

    def is_empty(self, pool: str, revision: str) -> bool:
        """No engine is there."""


@dataclass(frozen=True, slots=True)
class AdmissionDemand:
    """Who waits for a pool."""

    held: int  # for any engine
    queued: int  # for room
    queued_tokens: int


class Ticket:
    """A request that is in. `release` when its answer is over, with what it really used."""

    __slots__ = (
        "_gate", "_is_released", "_key", "cost", "estimated_tokens", "max_tokens", "since",
        "tenant", "waited_s",
    )  # fmt: skip

    def __init__(
        self, gate: AdmissionGate, tenant: Tenant, estimated_tokens: int, key: tuple[str, str]
    ) -> None:
        self._gate = gate
        self._key = key
        self._is_released = False
        self.tenant = tenant
        self.estimated_tokens = estimated_tokens  # that were charged; 0: nobody counts them
        self.cost = 0.0  # what the queue charged for its turn, if it waited
        self.since = 0.0  # when it began to wait
        self.waited_s = 0.0
        self.max_tokens = 0  # of its answer; known of those that waited

    def release(self, prompt_tokens: int = 0, output_tokens: int = 0, ending: Ending = "") -> None:
        if self._is_released:
            return
        self._is_released = True
        if self.estimated_tokens or self.cost:
            self._gate._released(self, self._key, prompt_tokens, output_tokens, ending)
        else:  # nothing was charged
            self.tenant.in_flight -= 1


class QueuedRequest:
    """A place in a queue. Await it for the ticket, or `cancel` it; one of the two must happen.

    To do something meanwhile (a progress comment), wait on `future` with a timeout, as often as
    needed, and await this object once it is done.
    """

    __slots__ = ("_gate", "_key", "_ticket", "entry", "future", "is_held")

    def __init__(
        self, gate: AdmissionGate, ticket: Ticket, key: tuple[str, str], *, is_held: bool
    ) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_held = is_held  # no engine was there when it came
        self.entry: QueueEntry
        self._gate = gate
        self._key = key
        self._ticket: Ticket | None = ticket

    @property
    def num_ahead(self) -> int:
        """About how many will go first."""
        return self._gate._ahead_of(self._key, self.entry)

    def cancel(self) -> None:
        """Nobody wants it any more. Harmless once it was awaited."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._gate._left(self, self._key)
            ticket.release()

    def __await__(self) -> Generator[object, None, Ticket]:
        try:
            yield from self.future
        except BaseException:  # refused, or the task was cancelled, maybe just after its turn came
            self.cancel()
            raise
        ticket, self._ticket = self._ticket, None
        assert ticket is not None, "awaited twice, or after cancel()"
        self._gate._forget_call(self._key)
        return ticket


class AdmissionGate:
    """See the module."""

    __slots__ = (
        "_called", "_clock", "_forecasts", "_memory", "_queues", "_rooms", "authenticate",
        "config", "holds", "tenants", "throttle",
    )  # fmt: skip

    def __init__(
        self,
        config: FlowConfig,
        table: KeyTable,
        rooms: CapacityView,
        clock: Callable[[], float],
        *,
        throttle: Throttle | None = None,
    ) -> None:
        self.config = config  # may be replaced at any time
        self.tenants = Tenants(table, clock)
        self.throttle = throttle
        self.holds: Mapping[str, float] = {}  # seconds, of pools with a value of their own
        self.authenticate = self.tenants.authenticate  # called per request: no frame of our own
        self._memory = Level.OK
        self._rooms = rooms
        self._clock = clock
        self._queues: dict[tuple[str, str], PoolQueue] = {}  # only those with someone in them
        self._called: dict[tuple[str, str], int] = {}  # whose turn has come, but who is not placed
        self._forecasts: dict[tuple[str, str], Forecast] = {}  # of queues that there were

    def replace_keys(self, table: KeyTable) -> None:
        self.tenants.replace(table)

    def change_memory(self, level: Level) -> None:
        """Memory is short, or no longer: see flow.memory."""
        self._memory = level
        full = level == Level.FULL
        self.authenticate = _refuse_for_memory if full else self.tenants.authenticate

    def admit(
        self,
        request: RouteRequest,
        tenant: Tenant,
        *,
        num_bytes: int = 0,
        deadline: float = math.inf,
    ) -> Ticket | QueuedRequest:
        """Let it in, now or later. Charges the tenant at once; `release` settles."""
        throttle = self.throttle
        if throttle is not None and throttle.shares and throttle.refuses(request.pool):
            raise Rejected(
                503,
                "overloaded",
                "Most requests for this model are being refused by its engines; try again later.",
                retry_after_s=MAX_RETRY_AFTER_S / 3,
            )
        key = (request.pool, request.revision)
        if tenant.is_free and key not in self._queues and self._rooms.has_room(*key):
            tenant.in_flight += 1
            return Ticket(self, tenant, 0, key)
        now = self._clock()
        tokens = self._estimate(request)
        tenant.enter(request, tokens, now)
        ticket = Ticket(self, tenant, tokens, key)
        if key not in self._queues and self._rooms.has_room(request.pool, request.revision):
            return ticket
        try:
            return self._queue(request, ticket, key, num_bytes, deadline, now)
        except Rejected:
            ticket.release()
            raise

    def wait_again(
        self,
        request: RouteRequest,
        ticket: Ticket,
        *,
        num_bytes: int = 0,
        deadline: float = math.inf,
    ) -> QueuedRequest:
        """Another turn for one that is in, but whose engines are gone. Raises Rejected.

        The ticket is the place's from now on: it comes back with the turn, or is released.
        """
        key = (request.pool, request.revision)  # it may have moved to another revision
        return self._queue(request, ticket, key, num_bytes, deadline, self._clock(), is_new=False)

    def wake(self, pool: str) -> None:
        """The pool may have room. Cheap when nobody waits."""
        if not self._queues:
            return
        for key in [key for key in self._queues if key[0] == pool]:
            self._call(key)

    def tick(self) -> None:
        """A few times a second: those who waited too long, and whatever room was not noticed."""
        now = self._clock()
        if self.throttle is not None:
            self.throttle.tick()
        for key, queue in list(self._queues.items()):
            for entry in queue.expired(now):
                entry.on_expired()
            self._call(key)

    def demand(self, pool: str) -> AdmissionDemand:
        held = queued = 0
        tokens = 0.0
        for (name, revision), queue in self._queues.items():
            if name == pool:
                tokens += queue.num_tokens
                if self._rooms.is_empty(name, revision):
                    held += len(queue)
                else:
                    queued += len(queue)
        return AdmissionDemand(held, queued, int(tokens))

    # below here: the queues

    def _estimate(self, request: RouteRequest) -> int:
        """Tokens that it will probably use; clients ask for far more than they get."""
        usual = self.config.default_max_tokens
        output = min(request.max_tokens or usual, usual) * request.num_answers
        return max(1, (request.prompt_tokens or request.prompt_bytes // 4) + output)

    def _queue(
        self,
        request: RouteRequest,
        ticket: Ticket,
        key: tuple[str, str],
        num_bytes: int,
        deadline: float,
        now: float,
        *,
        is_new: bool = True,  # nothing of its answer was computed
    ) -> QueuedRequest:
        config = self.config
        is_held = self._rooms.is_empty(*key)
        if deadline <= now:
            raise _too_late()
        queue = self._queue_with_room(key, num_bytes, is_held=is_held)
        prompt_tokens = request.prompt_tokens or request.prompt_bytes // 4
        output_tokens = self._estimate(request) - prompt_tokens
        ticket.cost = max(1.0, prompt_tokens + config.output_weight * output_tokens)
        ticket.since = ticket.since or now
        ticket.max_tokens = (request.max_tokens or config.default_max_tokens) * request.num_answers
        forecast = self._forecast_of(key)
        if is_new and not is_held:
            self._check(forecast, queue, request, ticket, deadline, now)
        waiting = QueuedRequest(self, ticket, key, is_held=is_held)
        limits = ticket.tenant.limits
        limit_s = (
            self.holds.get(key[0], config.hold_timeout_s) if is_held else config.queue_timeout_s
        )

        def turn() -> bool:
            if waiting.future.done():  # its task was cancelled and has not run since
                return False
            if is_new and not is_held and self._is_late(forecast, ticket, deadline):
                waiting.future.set_exception(self._expired(key, deadline, is_late=True))
                return False
            self._called[key] = self._called.get(key, 0) + 1
            ticket.waited_s = self._clock() - now
            waiting.future.set_result(None)
            return True

        def expire() -> None:
            if not waiting.future.done():
                waiting.future.set_exception(self._expired(key, deadline))

        waiting.entry = QueueEntry(
            tenant=ticket.tenant.name,
            cost=ticket.cost,
            num_bytes=num_bytes,
            since=now,
            deadline=min(now + limit_s, deadline),
            on_turn=turn,
            on_expired=expire,
            weight=limits.weight,
            band=limits.priority,
            priority=request.priority,
        )
        queue.push(waiting.entry)
        self._queues[key] = queue
        forecast.rate.waits(now, is_waiting=not is_held)
        return waiting

    def _queue_with_room(self, key: tuple[str, str], num_bytes: int, *, is_held: bool) -> PoolQueue:
        """Raises Rejected: its bounds are reached."""
        if self._memory:  # a body stays as long as it waits
            raise _no_memory()
        queue, config = self._queues.get(key), self.config
        if queue is None:
            queue = PoolQueue()
        if len(queue) >= config.max_queue or queue.num_bytes + num_bytes > config.max_queue_bytes:
            raise Rejected(
                503,
                "no_endpoints" if is_held else "queue_full",
                "No engine is ready to serve this model."
                if is_held
                else "All engines are busy and the queue is full.",
                retry_after_s=self._drain_s(key),
            )
        return queue

    def _forecast_of(self, key: tuple[str, str]) -> Forecast:
        forecast = self._forecasts.get(key)
        if forecast is None:
            forecast = self._forecasts[key] = Forecast()
        return forecast

    def _check(
        self,
        forecast: Forecast,
        queue: PoolQueue,
        request: RouteRequest,
        ticket: Ticket,
        deadline: float,
        now: float,
    ) -> None:
        """Raises Rejected: it could not be served in time."""
        if not queue.num_waiting:
            return
        limits = ticket.tenant.limits
        shortfall_s = forecast.shortfall_s(
            now,
            work_ahead=queue.cost_ahead(
                ticket.tenant.name,
                ticket.cost,
                weight=limits.weight,
                band=limits.priority,
                priority=request.priority,
            ),
            max_wait_s=self.config.queue_timeout_s,
            time_left_s=deadline - now,
            max_tokens=ticket.max_tokens,
            is_whole=not request.stream,
        )
        if shortfall_s > 0.0:
            raise Rejected(
                503,
                "queue_full",
                f"All engines are busy, and {queue.num_waiting} requests are waiting: this "
                f"one would miss its deadline by {shortfall_s:.1f} s.",
                retry_after_s=retry_after_s(shortfall_s),
            )

    def _is_late(self, forecast: Forecast, ticket: Ticket, deadline: float) -> bool:
        """Its turn has come, but its client would not get the answer in time."""
        now = self._clock()
        return forecast.is_late(
            now, deadline=deadline, max_tokens=ticket.max_tokens
        ) or forecast.is_overdue(now, since=ticket.since)

    def _call(self, key: tuple[str, str]) -> None:
        """Let as many go as there is room for."""
        queue = self._queues[key]
        if queue.num_waiting:
            room = self._rooms.room(*key) - self._called.get(key, 0)
            while room > 0 and (entry := queue.pop()) is not None:
                if entry.on_turn():
                    room -= 1
                    self._forecast_of(key).rate.took(entry.cost, self._clock())
        self._settle(key, queue)

    def _settle(self, key: tuple[str, str], queue: PoolQueue) -> None:
        """Some have left it."""
        is_waiting = bool(queue.num_waiting) and not self._rooms.is_empty(*key)
        self._forecast_of(key).rate.waits(self._clock(), is_waiting=is_waiting)
        if not queue.num_waiting:
            del self._queues[key]

    def _drain_s(self, key: tuple[str, str]) -> float:
        """About how long it takes until all have gone that wait now."""
        queue = self._queues.get(key)
        if queue is None:
            return retry_after_s(0.0)
        wait_s = self._forecast_of(key).rate.wait_s(queue.num_tokens, self._clock())
        return retry_after_s(wait_s or float(len(queue)))  # unknown: one a second

    def _expired(self, key: tuple[str, str], deadline: float, *, is_late: bool = False) -> Rejected:
        if deadline <= self._clock():
            return _too_late()
        if self._rooms.is_empty(*key):
            return Rejected(
                503,
                "no_endpoints",
                "No engine became ready to serve this model in time.",
                retry_after_s=MAX_RETRY_AFTER_S / 3,
            )
        return Rejected(
            503,
            "queue_timeout",
            "All engines stayed busy for the longest time that a request may wait."
            if not is_late
            else "All engines stayed busy for so long that the response would miss its deadline.",
            retry_after_s=self._drain_s(key),
        )

    def _ahead_of(self, key: tuple[str, str], entry: QueueEntry) -> int:
        queue = self._queues.get(key)
        return queue.ahead_of(entry) if queue is not None and entry.is_waiting else 0

    # called by tickets and places

    def _left(self, waiting: QueuedRequest, key: tuple[str, str]) -> None:
        future = waiting.future
        queue = self._queues.get(key)
        if waiting.entry.is_waiting:
            assert queue is not None, "its queue holds it"
            queue.discard(waiting.entry)
            if not waiting.is_held:
                now, since = self._clock(), waiting.entry.since
                self._forecast_of(key).patience.note(now - since, now, has_left=True)
            self._settle(key, queue)
            future.cancel()
        elif future.done() and not future.cancelled() and future.exception() is None:
            self._forget_call(key)  # its turn had come: it is the next one's now
            self.wake(key[0])

    def _forget_call(self, key: tuple[str, str]) -> None:
        left = self._called[key] - 1
        if left:
            self._called[key] = left
        else:
            del self._called[key]

    def _released(
        self,
        ticket: Ticket,
        key: tuple[str, str],
        prompt_tokens: int,
        output_tokens: int,
        ending: Ending,
    ) -> None:
        tenant, now = ticket.tenant, self._clock()
        used_tokens = prompt_tokens + output_tokens
        tenant.leave(ticket.estimated_tokens, used_tokens, now)
        if ticket.cost and ending:
            forecast, took_s = self._forecast_of(key), now - ticket.since
            forecast.patience.note(took_s, now, has_left=ending == "left")
            if ending == "whole":
                forecast.service.observe(
                    took_s - ticket.waited_s, tokens=output_tokens, max_tokens=ticket.max_tokens
                )
        queue = self._queues.get(key)
        if queue is not None and ticket.cost:
            cost = prompt_tokens + self.config.output_weight * output_tokens
            queue.settle(tenant.name, cost - ticket.cost, tenant.limits.weight)


def _no_memory() -> Rejected:
    return Rejected(
        503, "out_of_memory", "The router is short of memory; try again later.",
        retry_after_s=MAX_RETRY_AFTER_S / 6, close=True,
    )  # fmt: skip


def _refuse_for_memory(authorization: str = "", hint: str = "", /) -> Tenant:
    raise _no_memory()


def _too_late() -> Rejected:
    return Rejected(504, "deadline_exceeded", "The request's deadline passed before its turn came.")
