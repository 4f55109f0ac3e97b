"""What is read at each scrape: endpoints, queues, the index, shadows, connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.protocol import metric_names as names
from octavo_router.metrics.exposition import Rows, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry
    from octavo_router.routing.shadow import Shadows
    from octavo_router.routing.side_keeper import SideKeeper

STATES = ("connecting", "ready", "draining", "ejected", "down")

# (metric, what it says, how to read it; None: not known)
_ENDPOINT_GAUGES: tuple[tuple[str, str, Callable[[Endpoint], float | None]], ...] = (
    (
        names.ROUTER_ENDPOINT_IN_FLIGHT,
        "Requests of this router there.",
        lambda endpoint: endpoint.num_requests,
    ),
    (
        names.ROUTER_ENDPOINT_PENDING_TOKENS,
        "Uncached prompt tokens of those without a first token.",
        lambda endpoint: endpoint.pending_tokens,
    ),
    (
        names.ROUTER_ENDPOINT_RUNNING,
        "Sequences that the engine reports as running.",
        lambda endpoint: _reported(endpoint, endpoint.load.running),
    ),
    (
        names.ROUTER_ENDPOINT_WAITING,
        "Sequences that the engine reports as waiting.",
        lambda endpoint: _reported(endpoint, endpoint.load.waiting),
    ),
    (
        names.ROUTER_ENDPOINT_QUEUED_TOKENS,
        "Prompt tokens that the engine reports as not yet computed.",
        lambda endpoint: _reported(endpoint, endpoint.load.queued_tokens),
    ),
    (
        names.ROUTER_ENDPOINT_KV_USAGE_PERC,
        "Share of KV blocks that the engine reports as used; 1 is full.",
        lambda endpoint: _reported(endpoint, endpoint.load.kv_usage),
    ),
)


class QueueGauges(Protocol):
    """What flow.gate reports of a pool's queue."""

    @property
    def held(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...


class DemandGauges(Protocol):
    def __call__(self, pool: str, /) -> QueueGauges: ...


class IndexSizes(Protocol):
    """The part of ResidencyIndex that reports how large it is."""

    def num_keys(self, slot: int, /) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


def make_gauges(
    registry: Registry,
    index: IndexSizes,
    demand: DemandGauges,
    *,
    now: Callable[[], float],
) -> Callable[[], Iterator[Metric]]:
    """A source for RouterMetrics.add_source."""

    def read() -> Iterator[Metric]:
        endpoints = list(registry.endpoints.values())
        yield from _states(registry)
        for name, text, value in _ENDPOINT_GAUGES:
            yield _by_endpoint(name, text, endpoints, value)
        yield _by_endpoint(
            names.ROUTER_ENDPOINT_SIGNAL_AGE_SECONDS,
            "Time since the engine last reported its load.",
            endpoints,
            lambda endpoint: None if endpoint.load_at is None else now() - endpoint.load_at,
        )
        yield _by_endpoint(
            names.ROUTER_INDEX_KEYS,
            "Route keys known to be in its memory.",
            endpoints,
            lambda endpoint: index.num_keys(endpoint.slot) if endpoint.slot >= 0 else None,
        )
        yield gauge(
            names.ROUTER_INDEX_MEMORY_BYTES,
            "Memory of the residency index.",
            (),
            {(): index.memory_bytes},
        )
        yield from _queues(registry, demand)

    return read


def make_connection_gauges(
    clients: Callable[[], int], upstreams: Callable[[], int]
) -> Callable[[], Iterator[Metric]]:
    """A source, too."""

    def read() -> Iterator[Metric]:
        for name, text, count in (
            (names.ROUTER_CLIENT_CONNECTIONS, "Open connections of clients.", clients()),
            (names.ROUTER_UPSTREAM_CONNECTIONS, "Open connections to engines.", upstreams()),
        ):
            yield gauge(name, text, (), {(): count})

    return read


def make_side_counters(sides: SideKeeper) -> Callable[[], Iterator[Metric]]:
    """A source, too: engines that this router had change between prompts and answers."""

    def read() -> Iterator[Metric]:
        rows: Rows = {**sides.num_changes}
        yield counter(
            names.ROUTER_SIDE_CHANGES,
            "Engines that changed sides, by the side that they went to.",
            ("pool", "side"),
            rows,
        )

    return read


def make_shadow_gauges(shadows: Callable[[], Shadows | None]) -> Callable[[], Iterator[Metric]]:
    """A source, too: what the policies under comparison would have done."""

    def read() -> Iterator[Metric]:
        picks: Rows = {}
        regret: Rows = {}
        matched: Rows = {}
        found = shadows()
        for pair, sums in found.comparisons.items() if found is not None else ():
            picks[*pair, "same"] = sums.num_agreed
            picks[*pair, "better"] = sums.num_better
            picks[*pair, "worse"] = sums.num_worse
            regret[pair] = sums.regret_s_sum
            matched[*pair, "policy"] = sums.matched_tokens_live
            matched[*pair, "shadow"] = sums.matched_tokens_shadow
        labels = ("policy", "shadow")
        yield counter(
            names.ROUTER_SHADOW_PICKS,
            "Picks of another policy, on a sample, against the one in use.",
            (*labels, "verdict"),
            picks,
        )
        yield counter(
            names.ROUTER_SHADOW_MATCHED_TOKENS,
            "Cached tokens that each would have found.",
            (*labels, "of"),
            matched,
        )
        yield gauge(
            names.ROUTER_SHADOW_REGRET_SECONDS,
            "Expected seconds that the other policy would have saved, in all.",
            labels,
            regret,
        )

    return read


def _states(registry: Registry) -> Iterator[Metric]:
    rows: Rows = {(pool, state): 0 for pool in registry.pools for state in STATES}
    for endpoint in registry.endpoints.values():
        rows[endpoint.pool, endpoint.state] += 1
    yield gauge(names.ROUTER_ENDPOINTS, "Endpoints by state.", ("pool", "state"), rows)


def _queues(registry: Registry, demand: DemandGauges) -> Iterator[Metric]:
    waiting = {pool: demand(pool) for pool in registry.pools}
    for name, text, field in (
        (names.ROUTER_QUEUE_SIZE, "Requests that wait for room.", "queued"),
        (names.ROUTER_QUEUE_TOKENS, "Their tokens, as expected.", "queued_tokens"),
        (names.ROUTER_REQUESTS_HELD, "Requests that wait for any engine.", "held"),
    ):
        rows: Rows = {(pool,): getattr(one, field) for pool, one in waiting.items()}
        yield gauge(name, text, ("pool",), rows)


def _by_endpoint(
    name: str, text: str, endpoints: list[Endpoint], value: Callable[[Endpoint], float | None]
) -> Metric:
    values = ((endpoint, value(endpoint)) for endpoint in endpoints)
    rows: Rows = {
        (endpoint.pool, endpoint.id): number for endpoint, number in values if number is not None
    }
    return gauge(name, text, ("pool", "endpoint"), rows)


def _reported(endpoint: Endpoint, value: float) -> float | None:
    return None if endpoint.load_at is None else value
