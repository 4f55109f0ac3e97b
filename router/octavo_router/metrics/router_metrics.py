"""All metrics of one router process: where they are counted, and how they are exposed.

Counting is plain arithmetic on objects that the counters hold. Requests are counted in bundles, and
before anybody reads: a counter is looked up once for many. Everything that can be read when
somebody asks (loads, queues, the index) is read then: sources give those gauges at each scrape.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_common.loop_watch import STALL_S
from octavo_router.metrics import bundle
from octavo_router.metrics.counts import (
    DiscoveryCounts,
    EndpointCounts,
    LabelledCounter,
    PoolCounts,
    ProcessCounts,
    SignalCounts,
    TenantCounts,
)
from octavo_router.metrics.exposition import families
from octavo_router.metrics.histogram import LAG_BUCKETS, Histogram
from octavo_router.metrics.labels import LabelSet
from octavo_router.metrics.version import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from octavo_router.metrics.record import RequestRecord

UNKNOWN_MODEL = "unknown"
BUNDLE = 64  # requests that are counted together


class RouterMetrics:
    """One registry, one event loop, no locks."""

    __slots__ = (
        "_endpoints", "_folds", "_model_labels", "_over", "_pools", "_requests", "_sources",
        "_tenant_labels", "_tenants", "_tokens", "_version", "discoveries", "loop_lag", "now",
        "on_counted", "process", "signals",
    )  # fmt: skip

    def __init__(
        self,
        *,
        version: str = "",
        max_label_values: int = 1000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._version = version  # "": the installed one, once somebody asks
        self.now = now
        self.signals = SignalCounts()
        self.process = ProcessCounts()
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.discoveries: dict[str, DiscoveryCounts] = {}
        # Requests that are over and not counted yet. Whoever reads counts sees them counted.
        self._over: list[RequestRecord] = []
        self._folds: list[Callable[[], None]] = []
        # Hears of those that are counted; the console's.
        self.on_counted: Callable[[list[RequestRecord]], None] | None = None
        self._requests = LabelledCounter()  # (model, route, code, stream, outcome)
        self._tokens = LabelledCounter()  # (model, kind)
        self._pools: dict[str, PoolCounts] = {}
        self._endpoints: dict[str, EndpointCounts] = {}
        self._tenants: dict[str, TenantCounts] = {}
        self._model_labels = LabelSet(max_label_values)
        self._tenant_labels = LabelSet(max_label_values)
        self._sources: list[Callable[[], Iterable[Metric]]] = []

    # -- counting

    def finish(self, record: RequestRecord) -> None:
        """Takes a request that is over. Hot path: counted with others, some dozens at a time."""
        if not record.ended_at:
            record.ended_at = self.now()
        over = self._over
        over.append(record)
        if len(over) >= BUNDLE:
            self.fold()

    def note_loop_lag(self, lag_s: float) -> None:
        """Of one tick of the event loop."""
        self.loop_lag.observe(lag_s)
        if lag_s >= STALL_S:
            self.process.loop_stalls += 1

    def add_fold(self, fold: Callable[[], None]) -> None:
        """Somebody else who counts later: called before counts are read, and now and then."""
        self._folds.append(fold)

    def fold(self) -> None:
        """Counts what is over."""
        for fold in self._folds:
            fold()
        if not self._over:
            return
        over, self._over = self._over, []
        if self.on_counted is not None:
            self.on_counted(over)
        for group in bundle.sort_out(over):
            self._count(group)

    def _count(self, group: bundle.RecordGroup) -> None:
        """All of one kind."""
        one, number = group.records[0], len(group.records)
        model = self.model_label(one.model, is_known=one.is_known_model)
        stream = "true" if one.is_stream else "false"
        self._requests.add(model, one.route, str(one.status), stream, one.verdict, by=number)
        bundle.count_tokens(group, model, self._tokens)
        if one.tenant:
            bundle.count_tenant(group, self._tenant(one.tenant))
        if one.pool:
            bundle.count_pool(group, self.held_pool(one.pool))

    def held_pool(self, name: str) -> PoolCounts:
        """To add to. Names come from configuration and discovery, never from clients."""
        counts = self._pools.get(name)
        if counts is None:
            counts = self._pools[name] = PoolCounts()
        return counts

    def held_endpoint(self, id_: str, *, pool: str) -> EndpointCounts:
        """To add to."""
        counts = self._endpoints.get(id_)
        if counts is None:
            counts = self._endpoints[id_] = EndpointCounts(pool)
        return counts

    def forget_endpoint(self, id_: str) -> None:
        """Its series end with it: a thousand replaced pods leave nothing behind."""
        self.fold()
        self._endpoints.pop(id_, None)

    def discovery(self, source: str) -> DiscoveryCounts:
        counts = self.discoveries.get(source)
        if counts is None:
            counts = self.discoveries[source] = DiscoveryCounts()
        return counts

    def model_label(self, model: str, *, is_known: bool) -> str:
        """Clients may name anything; only what is served becomes a series."""
        return self._model_labels(model) if is_known else UNKNOWN_MODEL

    def _tenant(self, name: str) -> TenantCounts:
        label = self._tenant_labels(name)
        counts = self._tenants.get(label)
        if counts is None:
            counts = self._tenants[label] = TenantCounts()
        return counts

    # -- reading

    @property
    def version(self) -> str:
        return self._version or self.find_version()

    def find_version(self) -> str:
        """Reads files: best done off the loop, before somebody asks."""
        self._version = installed_version()
        return self._version

    @property
    def requests(self) -> LabelledCounter:
        self.fold()
        return self._requests

    @property
    def tokens(self) -> LabelledCounter:
        self.fold()
        return self._tokens

    @property
    def pools(self) -> dict[str, PoolCounts]:
        self.fold()
        return self._pools

    @property
    def endpoints(self) -> dict[str, EndpointCounts]:
        self.fold()
        return self._endpoints

    @property
    def tenants(self) -> dict[str, TenantCounts]:
        self.fold()
        return self._tenants

    def pool(self, name: str) -> PoolCounts:
        """With everything counted."""
        self.fold()
        return self.held_pool(name)

    # -- exposing

    def add_source(self, gauges: Callable[[], Iterable[Metric]]) -> None:
        """Gauges that are read at each scrape."""
        self._sources.append(gauges)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: Prometheus text, or OpenMetrics where requested."""
        # Here: importing it takes as long as half of the router, and nobody scrapes at once.
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        encoder, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return encoder(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from families(self)
        for source in self._sources:
            yield from source()
