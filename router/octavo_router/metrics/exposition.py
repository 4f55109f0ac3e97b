"""The router's counts as Prometheus families: one table row for each metric.

The client library is imported where it is needed: a router that starts needs it only later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from octavo_engine.protocol import metric_names as names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from octavo_router.metrics.counts import (
        DiscoveryCounts,
        EndpointCounts,
        LabelledCounter,
        PoolCounts,
        ProcessCounts,
        SignalCounts,
        TenantCounts,
    )
    from octavo_router.metrics.histogram import Histogram

Rows: TypeAlias = dict[tuple[str, ...], float]


class RouterCounts(Protocol):
    """The counts that are exposed; `RouterMetrics` holds them."""

    now: Callable[[], float]
    signals: SignalCounts
    process: ProcessCounts
    loop_lag: Histogram
    discoveries: dict[str, DiscoveryCounts]

    @property
    def version(self) -> str: ...

    @property
    def requests(self) -> LabelledCounter: ...

    @property
    def tokens(self) -> LabelledCounter: ...

    @property
    def pools(self) -> dict[str, PoolCounts]: ...

    @property
    def endpoints(self) -> dict[str, EndpointCounts]: ...

    @property
    def tenants(self) -> dict[str, TenantCounts]: ...


# (metric, what it says, field of PoolCounts)
_POOL_HISTOGRAMS = (
    (names.ROUTER_REQUEST_DURATION_SECONDS, "Arrival to the end of the answer.", "duration"),
    (names.ROUTER_TIME_TO_FIRST_TOKEN_SECONDS, "Arrival to the first token.", "ttft"),
    (names.ROUTER_INTER_TOKEN_LATENCY_SECONDS, "Between events of a stream.", "itl"),
    (
        names.ROUTER_TIME_PER_OUTPUT_TOKEN_SECONDS,
        "Mean time of a token after the first.",
        "tpot",
    ),
    (names.ROUTER_QUEUE_DURATION_SECONDS, "Time a request waited for room.", "queue_wait"),
    (names.ROUTER_PICK_DURATION_SECONDS, "Time to choose an endpoint.", "pick"),
    (names.ROUTER_REQUEST_SIZE_BYTES, "Bodies of requests.", "request_bytes"),
    (names.ROUTER_RESPONSE_SIZE_BYTES, "Bodies of answers.", "response_bytes"),
    (
        names.ROUTER_PREFIX_PREDICTION_ERROR_TOKENS,
        "How far the cached tokens that an engine reported lie from those predicted.",
        "prediction_error",
    ),
)
_POOL_COUNTERS = (
    (
        names.ROUTER_PREFIX_QUERIED_TOKENS,
        "Prompt tokens of requests whose engine reported cached tokens.",
        "queried_tokens",
    ),
    (
        names.ROUTER_PREFIX_PREDICTED_TOKENS,
        "Of these, predicted to be cached where they were sent.",
        "predicted_tokens",
    ),
    (names.ROUTER_PREFIX_CACHED_TOKENS, "Of these, cached as reported.", "cached_tokens"),
    (
        names.ROUTER_CLIENT_DISCONNECTS,
        "Clients that disconnected before their response.",
        "client_disconnects",
    ),
    (names.ROUTER_RETRIES, "Requests sent again to another engine.", "retries"),
    (names.ROUTER_ADAPTER_LOADS, "LoRA adapters that engines loaded.", "adapter_loads"),
    (
        names.ROUTER_ADAPTER_LOAD_FAILURES,
        "LoRA adapters that engines could not load.",
        "adapter_load_failures",
    ),
    (names.ROUTER_ADAPTER_UNLOADS, "LoRA adapters that engines unloaded.", "adapter_unloads"),
    (names.ROUTER_EJECTIONS, "Endpoints set aside for their failures.", "ejections"),
    (
        names.ROUTER_RETRIES_EXHAUSTED,
        "Requests that failed for want of another attempt.",
        "retries_exhausted",
    ),
    (
        names.ROUTER_QUARANTINED_REQUESTS,
        "Requests refused because two engines died while processing them.",
        "quarantined",
    ),
)
# (metric, what it says, field, labels)
_POOL_TALLIES = (
    (names.ROUTER_REJECTIONS, "Requests refused by the router.", "rejections", ("reason",)),
    (names.ROUTER_UPSTREAM_ATTEMPTS, "Attempts at engines.", "attempts", ("outcome",)),
    (
        names.ROUTER_RESUMES,
        "Generations continued on another engine, by how the request ended.",
        "resumes",
        ("outcome",),
    ),
    (
        names.ROUTER_HANDED_OVER_PROMPTS,
        "Prompts that one engine computed, or should have, for another one's answer.",
        "prompts",
        ("outcome",),
    ),
    (names.ROUTER_STATE_CHANGES, "Endpoints that entered a state.", "state_changes", ("state",)),
)


def families(metrics: RouterCounts) -> Iterator[Metric]:
    """All that is counted. Gauges read elsewhere are not among them."""
    from prometheus_client.core import InfoMetricFamily

    info = InfoMetricFamily(names.ROUTER_INFO, "The router's build.")
    info.add_metric([], {"version": metrics.version})
    yield info
    yield counter(
        names.ROUTER_REQUESTS,
        "Requests answered; code 0: the client was gone. A stream may fail after code 200.",
        ("model", "route", "code", "stream", "outcome"),
        metrics.requests,
    )
    yield counter(names.ROUTER_TOKENS, "Tokens.", ("model", "kind"), metrics.tokens)
    yield from _pools(metrics)
    yield from _endpoints(metrics)
    yield from _tenants(metrics)
    yield from _signals(metrics)
    yield from _process(metrics)


def gauge(
    name: str, text: str, labels: Iterable[str], rows: Mapping[tuple[str, ...], float]
) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=list(labels))
    for values, value in rows.items():
        family.add_metric(list(values), value)
    return family


def counter(
    name: str, text: str, labels: Iterable[str], rows: Mapping[tuple[str, ...], float]
) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=list(labels))
    for values, value in rows.items():
        family.add_metric(list(values), value)
    return family


def histogram(
    name: str, text: str, labels: Iterable[str], rows: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=list(labels))
    for values, value in rows.items():
        family.add_metric(list(values), value.cumulative(), value.sum)
    return family


def _pools(metrics: RouterCounts) -> Iterator[Metric]:
    pools = metrics.pools
    yield gauge(
        names.ROUTER_REQUESTS_RUNNING,
        "Requests being answered.",
        ("pool",),
        {(name,): pool.running for name, pool in pools.items()},
    )
    for metric, text, field in _POOL_HISTOGRAMS:
        yield histogram(metric, text, ("pool",), _by_pool(pools, field))
    for metric, text, field in _POOL_COUNTERS:
        yield counter(metric, text, ("pool",), _by_pool(pools, field))
    for metric, text, field, labels in _POOL_TALLIES:
        rows: Rows = {
            (name, *values): count
            for name, pool in pools.items()
            for values, count in getattr(pool, field).items()
        }
        yield counter(metric, text, ("pool", *labels), rows)


def _by_pool(pools: Mapping[str, PoolCounts], field: str) -> dict[tuple[str, ...], Any]:
    return {(name,): getattr(pool, field) for name, pool in pools.items()}


def _endpoints(metrics: RouterCounts) -> Iterator[Metric]:
    picks: Rows = {
        (counts.pool, id_, policy): count
        for id_, counts in metrics.endpoints.items()
        for (policy,), count in counts.picks.items()
    }
    outcomes: Rows = {
        (counts.pool, id_, outcome): count
        for id_, counts in metrics.endpoints.items()
        for (outcome,), count in counts.outcomes.items()
    }
    yield counter(names.ROUTER_PICKS, "Decisions.", ("pool", "endpoint", "policy"), picks)
    yield counter(
        names.ROUTER_UPSTREAM_REQUESTS,
        "Attempts at each engine.",
        ("pool", "endpoint", "outcome"),
        outcomes,
    )


def _tenants(metrics: RouterCounts) -> Iterator[Metric]:
    tenants = metrics.tenants.items()
    tokens: Rows = {
        (name, kind): getattr(counts, f"{kind}_tokens")
        for name, counts in tenants
        for kind in ("prompt", "output")
    }
    yield counter(
        names.ROUTER_TENANT_REQUESTS,
        "Requests of a tenant.",
        ("tenant",),
        {(name,): counts.requests for name, counts in tenants},
    )
    yield counter(
        names.ROUTER_TENANT_REJECTIONS,
        "Requests of a tenant refused with 429 or 503.",
        ("tenant",),
        {(name,): counts.rejections for name, counts in tenants},
    )
    yield counter(
        names.ROUTER_TENANT_QUEUE_SECONDS,
        "Time a tenant's requests waited.",
        ("tenant",),
        {(name,): counts.queue_s for name, counts in tenants},
    )
    yield counter(names.ROUTER_TENANT_TOKENS, "Tokens of a tenant.", ("tenant", "kind"), tokens)


def _signals(metrics: RouterCounts) -> Iterator[Metric]:
    signals = metrics.signals
    frames: Rows = {
        (kind,): getattr(signals, f"{kind}s") for kind in ("hello", "snapshot", "delta")
    }
    frames["draining",] = signals.draining
    yield counter(names.ROUTER_SIGNAL_FRAMES, "Frames of engines' streams.", ("kind",), frames)
    yield counter(
        names.ROUTER_SIGNAL_BYTES,
        "Residency changes that engines reported.",
        ("kind",),
        {("stored",): signals.stored_bytes, ("evicted",): signals.evicted_bytes},
    )
    yield counter(names.ROUTER_SIGNAL_BREAKS, "Streams that ended.", ("reason",), signals.breaks)
    yield counter(
        names.ROUTER_SIGNAL_CONNECTS, "Attempts to follow.", ("outcome",), signals.connects
    )
    yield counter(names.ROUTER_POLLS, "Polls of plain servers.", ("outcome",), signals.polls)
    yield counter(
        names.ROUTER_KV_EVENTS, "KV events of plain servers.", ("type", "status"), signals.kv_events
    )
    sources = metrics.discoveries.items()
    for name, text, field in (
        (names.ROUTER_DISCOVERY_UPDATES, "Changes of the set of endpoints.", "updates"),
        (names.ROUTER_DISCOVERY_ERRORS, "Failures of a source of endpoints.", "errors"),
        (names.ROUTER_DISCOVERY_RELISTS, "Times a source was read anew.", "relists"),
    ):
        rows: Rows = {(source,): getattr(counts, field) for source, counts in sources}
        yield counter(name, text, ("source",), rows)
    now = metrics.now()
    yield gauge(
        names.ROUTER_DISCOVERY_AGE_SECONDS,
        "Time since a source was last heard.",
        ("source",),
        {
            (source,): now - counts.heard_at
            for source, counts in sources
            if counts.heard_at is not None
        },
    )


def _process(metrics: RouterCounts) -> Iterator[Metric]:
    process = metrics.process
    yield counter(
        names.ROUTER_CONFIG_RELOADS,
        "Readings of a changed configuration.",
        ("outcome",),
        process.config_reloads,
    )
    yield counter(
        names.ROUTER_LOOP_STALLS,
        "Times the event loop stood still for over a second.",
        (),
        {(): process.loop_stalls},
    )
    yield counter(
        names.ROUTER_CLOCK_JUMPS,
        "Times that the wall clock was set.",
        (),
        {(): process.clock_jumps},
    )
    yield histogram(
        names.ROUTER_LOOP_LAG_SECONDS,
        "Delay of the event loop behind its timers.",
        (),
        {(): metrics.loop_lag},
    )
