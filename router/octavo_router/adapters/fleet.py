"""The adapters of all pools: demand in, loads and unloads out, and who waits for which.

Pure but for the calls to engines, which the caller makes and reports back. What an engine has is
read from its endpoint: its signals say so, and a call that succeeded is entered there at once.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_engine.protocol.state import AdapterState
from octavo_router.adapters.demand import AdapterDemand
from octavo_router.adapters.placement import AdapterNeed, EngineSlots, place_adapters
from octavo_router.errors import NOT_LOADED, Rejected
from octavo_router.metrics.counts import PoolCounts
from octavo_router.routing import pricing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from octavo_router.config.settings import AdapterConfig, PoolConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change, Registry
    from octavo_router.routing.request import RouteRequest

logger = logging.getLogger("octavo.router")

FAILED_S = 30.0  # before an engine that could not load an adapter tries again
FIRST_LOAD_S = 0.1  # until a load was measured
LOAD_WEIGHT = 0.2  # of the newest load in the average
SHORT_PROMPT = 256  # tokens, for what a queue costs
LONGEST_REASON = 300  # characters of an engine's own words


class AdapterCalls(Protocol):
    """Asks engines. Reports to `AdapterFleet.loaded`, `failed` and `unloaded`, never within."""

    def load(self, endpoint: Endpoint, name: str, uri: str, *, in_place: bool) -> None:
        """`in_place`: other files under that name may be loaded; requests with them go on."""

    def unload(self, endpoint: Endpoint, name: str, then: Callable[[], None]) -> None:
        """`then`: called when it is over, however it went."""


class AdapterWait:
    """A request that cannot be placed until its adapter is loaded. `cancel` may come any time."""

    __slots__ = ("_done", "_queue", "within")

    def __init__(
        self,
        queue: deque[AdapterWait],
        within: frozenset[str],
        done: Callable[[Rejected | None], None],
    ) -> None:
        self.within = within  # engines of which one must have it; empty: of all
        self._queue = queue
        self._done: Callable[[Rejected | None], None] | None = done
        queue.append(self)

    def cancel(self) -> None:
        if self._done is not None:
            self._done = None
            self._queue.remove(self)

    def finish(self, error: Rejected | None) -> None:
        done = self._done
        self.cancel()
        if done is not None:
            done(error)


@dataclass(slots=True)
class _Load:
    """A load that an engine was sent, or will be."""

    since: float
    uri: str


@dataclass(slots=True)
class _Failed:
    """A load that did not succeed."""

    at: float
    reason: str


@dataclass(slots=True)
class _PoolAdapters:
    """What is known of one pool's adapters."""

    slots: int = 0
    adapters: dict[str, AdapterConfig] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    demand: AdapterDemand = field(default_factory=AdapterDemand)
    waits: dict[str, deque[AdapterWait]] = field(default_factory=dict)
    load_s: float = FIRST_LOAD_S

    def need(self, adapter: AdapterConfig, now: float) -> AdapterNeed:
        waits = self.waits.get(adapter.name, ())
        return AdapterNeed(
            adapter.name,
            self.demand.rate(adapter.name, now),
            len(waits),
            adapter.is_everywhere,
            frozenset(wait.within for wait in waits),
        )


@dataclass(slots=True)
class _EngineAdapters:
    """What this router knows of one engine's adapters beyond their names."""

    since: dict[str, float] = field(default_factory=dict)  # first seen there
    loading: dict[str, _Load] = field(default_factory=dict)
    unloading: set[str] = field(default_factory=set)
    failed: dict[str, _Failed] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)  # loaded, with the files of an earlier uri


class AdapterFleet:
    """Belongs to the event loop. `tick` wants to be called about once a second."""

    def __init__(
        self,
        registry: Registry,
        calls: AdapterCalls,
        *,
        clock: Callable[[], float],
        counts_of: Callable[[str], PoolCounts] | None = None,
    ) -> None:
        """`counts_of`: where a pool's loads are counted."""
        self._registry = registry
        self._calls = calls
        self._clock = clock
        self._counts_of = counts_of if counts_of is not None else lambda _: PoolCounts()
        self._pools: dict[str, _PoolAdapters] = {}
        self._engines: dict[Endpoint, _EngineAdapters] = {}
        registry.subscribe(self._changed)

    def configure(self, pools: Sequence[PoolConfig]) -> None:
        """The adapters that pools have from now on."""
        configs = {pool.name: pool for pool in pools}
        for name in {*self._pools, *(pool.name for pool in pools if pool.adapters)}:
            config = configs.get(name)
            adapters = {one.name: one for one in config.adapters} if config is not None else {}
            pool = self._pools.setdefault(name, _PoolAdapters())
            if config is not None:
                pool.slots = config.adapter_slots
            before, pool.adapters = pool.adapters, adapters
            pool.retired = (pool.retired | before.keys()) - adapters.keys()
            for old, adapter in before.items():
                if old not in adapters:
                    self._end_waits(pool, old, _removed(old))
                elif adapters[old].uri != adapter.uri:
                    self._replace(name, old)
            self._place(name)
            self._renew(name)

    @property
    def pools(self) -> Mapping[str, object]:
        return self._pools

    def needed(self, request: RouteRequest, exclude: Collection[Endpoint] = ()) -> bool:
        """Whether the request has to wait for its adapter. Hot path: once per attempt with one."""
        pool = self._pools.get(request.pool)
        if pool is None or request.adapter not in pool.adapters:
            return False
        request.needs_adapter = True
        candidates = self._candidates(request, exclude)
        return bool(candidates) and not any(
            request.adapter in one.adapters and request.adapter not in self._of(one).unloading
            for one in candidates
        )  # where nobody serves the pool, the request waits for an engine first

    def note(self, request: RouteRequest) -> None:
        """A request for an adapter has come."""
        pool = self._pools.get(request.pool)
        if pool is not None and request.adapter in pool.adapters:
            pool.demand.note(request.adapter, self._clock())

    def wait(
        self,
        request: RouteRequest,
        done: Callable[[Rejected | None], None],
        exclude: Collection[Endpoint] = (),
    ) -> AdapterWait:
        """Until its adapter is loaded, or cannot be. Raises Rejected where that is known now.

        `done` is called later, once, with why it cannot be or None; not after `cancel`.
        """
        name, pool = request.adapter, self._pools[request.pool]
        is_any = not exclude and not request.subset and not request.revision
        candidates = [] if is_any else self._candidates(request, exclude)
        within = frozenset(endpoint.id for endpoint in candidates)
        if (error := self._hopeless(request.pool, name, within)) is not None:
            raise error
        wait = AdapterWait(pool.waits.setdefault(name, deque()), within, done)
        self._place(request.pool, is_urgent=True)
        return wait

    def move(self, request: RouteRequest, error: Rejected) -> bool:
        """No engine of the request's revision could load its adapter: whether another revision may
        serve it, which the request is for from now on. It is a failure of the first one, though the
        client gets an answer."""
        if not request.revision or error.code != NOT_LOADED:
            return False
        now, name = self._clock(), request.adapter
        able = [
            one
            for one in self._registry.candidates(request.pool).endpoints
            if one.spec.revision != request.revision and not self._has_failed(one, name, now)
        ]
        if not able:
            return False
        chosen = max(able, key=lambda one: (name in one.adapters, one.spec.revision))
        counts = self._counts_of(request.pool).revision(request.revision)
        counts.requests += 1
        counts.errors += 1
        request.revision = chosen.spec.revision
        return True

    def missing(self, endpoint: Endpoint, request: RouteRequest) -> bool:
        """The engine answered that it does not have the model: whether the request may be placed
        again, as another router has unloaded its adapter there."""
        if not request.needs_adapter or request.adapter not in endpoint.adapters:
            return False
        self._leave(endpoint, request.adapter)
        return True

    def idle(self, endpoint: Endpoint) -> None:
        """No request uses one of its adapters any more: it may make room."""
        pool = self._pools.get(endpoint.pool)
        if pool is not None and any(pool.waits.values()):
            self._place(endpoint.pool, is_urgent=True)

    def tick(self) -> None:
        now = self._clock()
        for name, pool in self._pools.items():
            pool.demand.forget_old(now)
            self._place(name)
            self._renew(name)

    def states(self, pool: str) -> list[AdapterState]:
        """Of each adapter of a pool, for the operator."""
        known = self._pools.get(pool)
        if known is None:
            return []
        return [self._state(pool, name) for name in known.adapters]

    # -- what became of calls

    def loaded(self, endpoint: Endpoint, name: str) -> None:
        if not self._is_here(endpoint):
            return
        self._counts_of(endpoint.pool).adapter_loads += 1
        engine = self._of(endpoint)
        load = engine.loading.pop(name, None)
        engine.failed.pop(name, None)
        engine.stale.discard(name)
        pool = self._pools[endpoint.pool]
        if load is not None:
            pool.load_s += LOAD_WEIGHT * (self._clock() - load.since - pool.load_s)
            config = pool.adapters.get(name)
            if config is not None and config.uri != load.uri:  # it was changed meanwhile
                engine.stale.add(name)
        endpoint.adapters |= {name}
        engine.since[name] = self._clock()
        for wait in tuple(pool.waits.get(name, ())):
            if not wait.within or endpoint.id in wait.within:
                wait.finish(None)
        self._place(endpoint.pool, is_urgent=True)

    def failed(self, endpoint: Endpoint, name: str, reason: str) -> None:
        if not self._is_here(endpoint):
            return
        self._counts_of(endpoint.pool).adapter_load_failures += 1
        engine = self._of(endpoint)
        engine.loading.pop(name, None)
        engine.failed[name] = _Failed(self._clock(), reason[:LONGEST_REASON])
        logger.warning(
            "Could not load an adapter",
            extra={"adapter": name, "endpoint": endpoint.spec.address.authority, "reason": reason},
        )
        for wait in tuple(self._pools[endpoint.pool].waits.get(name, ())):
            if (error := self._hopeless(endpoint.pool, name, wait.within)) is not None:
                wait.finish(error)
        self._place(endpoint.pool, is_urgent=True)

    def unloaded(self, endpoint: Endpoint, name: str) -> None:
        if self._is_here(endpoint):
            self._counts_of(endpoint.pool).adapter_unloads += 1
            self._of(endpoint).unloading.discard(name)
            self._leave(endpoint, name)

    # -- below here: placing

    def _place(self, pool_name: str, *, is_urgent: bool = False) -> None:
        """`is_urgent`: what is loaded nowhere and waited for by nobody is left to the next tick."""
        pool = self._pools[pool_name]
        now = self._clock()
        members = self._registry.candidates(pool_name).endpoints
        by_id = {endpoint.id: endpoint for endpoint in members}
        names: set[str] = set(pool.adapters)
        if is_urgent:
            names = {name for name, waits in pool.waits.items() if waits}
            for endpoint in members:
                names |= endpoint.adapters | self._of(endpoint).loading.keys()
        moves = place_adapters(
            [self._slots(endpoint, pool.slots, now) for endpoint in members],
            [pool.need(pool.adapters[name], now) for name in names & pool.adapters.keys()],
            load_s=pool.load_s,
            total_rate=pool.demand.total_rate(now),
            retired=frozenset(pool.retired),
        )
        for move in moves:
            self._carry_out(pool, by_id[move.engine], move.load, move.unload)

    def _carry_out(self, pool: _PoolAdapters, endpoint: Endpoint, load: str, unload: str) -> None:
        engine = self._of(endpoint)
        uri = pool.adapters[load].uri if load else ""
        if load:
            engine.loading[load] = _Load(self._clock(), uri)

        def then() -> None:
            if load and load in engine.loading:
                self._calls.load(endpoint, load, uri, in_place=False)

        if unload:
            engine.unloading.add(unload)
            self._leave(endpoint, unload)  # from now on no request is sent there for it
            self._calls.unload(endpoint, unload, then)
        else:
            then()

    def _slots(self, endpoint: Endpoint, slots: int, now: float) -> EngineSlots:
        engine = self._of(endpoint)
        engine.since = {name: engine.since.get(name, now) for name in endpoint.adapters}
        engine.failed = {
            name: one for name, one in engine.failed.items() if now - one.at < FAILED_S
        }
        return EngineSlots(
            endpoint.id,
            slots,
            pricing.wait_s(endpoint, SHORT_PROMPT),
            {name: now - at for name, at in engine.since.items()},
            frozenset(engine.loading),
            frozenset(engine.unloading),
            frozenset(endpoint.adapters_in_use),
            frozenset(engine.failed),
        )

    def _hopeless(self, pool: str, name: str, within: frozenset[str]) -> Rejected | None:
        """Why no engine will have the adapter soon; None: one may."""
        members = self._registry.candidates(pool).endpoints
        members = [one for one in members if not within or one.id in within]
        now = self._clock()
        failures = [
            self._of(endpoint).failed[name]
            for endpoint in members
            if self._has_failed(endpoint, name, now)
        ]
        if not members or len(failures) < len(members):
            return None
        last = max(failures, key=lambda one: one.at)
        return Rejected(
            503,
            NOT_LOADED,
            f"The adapter `{name[:200]}` could not be loaded on any engine. The last one said: "
            f"{last.reason}",
            param="model",
            retry_after_s=max(1.0, FAILED_S - (now - min(one.at for one in failures))),
        )

    def _has_failed(self, endpoint: Endpoint, name: str, now: float) -> bool:
        """And is not tried again yet."""
        failed = self._of(endpoint).failed.get(name)
        return failed is not None and now - failed.at < FAILED_S

    def _state(self, pool: str, name: str) -> AdapterState:
        state, reason = "unloaded", ""
        for endpoint in self._registry.pool(pool):
            engine = self._of(endpoint)
            failed = engine.failed.get(name)
            if endpoint.state == "ready" and name in endpoint.adapters:
                return AdapterState(name, "loaded", failed.reason if failed is not None else "")
            if name in engine.loading:
                state, reason = "loading", ""
            elif state != "loading" and failed is not None:
                state, reason = "failed", failed.reason
        return AdapterState(name, state, reason)

    def _end_waits(self, pool: _PoolAdapters, name: str, error: Rejected) -> None:
        for wait in tuple(pool.waits.get(name, ())):
            wait.finish(error)

    def _replace(self, pool: str, name: str) -> None:
        """The same name means other files: engines that have the old ones load again."""
        for endpoint in self._registry.pool(pool):
            engine = self._of(endpoint)
            engine.failed.pop(name, None)
            if name in endpoint.adapters:
                engine.stale.add(name)

    def _renew(self, pool_name: str) -> None:
        """Load other files under the same names; until they are there, requests get the old."""
        pool = self._pools[pool_name]
        for endpoint in self._registry.candidates(pool_name).endpoints:
            engine = self._of(endpoint)
            engine.stale &= endpoint.adapters & pool.adapters.keys()
            for name in engine.stale - engine.loading.keys() - engine.failed.keys():
                uri = pool.adapters[name].uri
                engine.loading[name] = _Load(self._clock(), uri)
                self._calls.load(endpoint, name, uri, in_place=True)

    def _candidates(self, request: RouteRequest, exclude: Collection[Endpoint]) -> list[Endpoint]:
        """Who may serve the request, whether it has the adapter or not."""
        return [
            one
            for one in self._registry.candidates(request.pool, request.revision).endpoints
            if one not in exclude
            and (not request.subset or one.spec.address.authority in request.subset)
        ]

    def _is_here(self, endpoint: Endpoint) -> bool:
        return self._registry.endpoints.get(endpoint.id) is endpoint

    def _leave(self, endpoint: Endpoint, name: str) -> None:
        endpoint.lose_adapters({name})
        self._of(endpoint).since.pop(name, None)

    def _of(self, endpoint: Endpoint) -> _EngineAdapters:
        engine = self._engines.get(endpoint)
        if engine is None:
            engine = self._engines[endpoint] = _EngineAdapters()
        return engine

    def _changed(self, change: Change) -> None:
        endpoint = change.endpoint
        if change.kind == "removed":
            self._engines.pop(endpoint, None)
        elif endpoint.state in ("down", "connecting"):
            # What it had is gone with its process, or is reported again.
            self._engines.pop(endpoint, None)
        if endpoint.pool in self._pools:
            self._place(endpoint.pool, is_urgent=True)


def _removed(name: str) -> Rejected:
    return Rejected(
        404, "model_not_found", f"The adapter `{name[:200]}` was removed.", param="model"
    )
