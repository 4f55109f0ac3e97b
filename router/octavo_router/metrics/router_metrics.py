"""All metrics of one router process: where they are counted, and how they are exposed.

Counting is plain arithmetic on objects that the counters hold. Everything that can be read when
somebody asks (loads, queues, the index) is read then: sources give those gauges at each scrape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from octavo_router.metrics.counts import (
    DiscoveryCounts,
    EndpointCounts,
    PoolCounts,
    ProcessCounts,
    SignalCounts,
    Tally,
)
from octavo_router.metrics.exposition import families
from octavo_router.metrics.histogram import LAG_BUCKETS, Histogram
from octavo_router.metrics.labels import LabelSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from octavo_router.metrics.record import RequestRecord

UNKNOWN_MODEL = "unknown"


@dataclass(slots=True)
class TenantCounts:
    """What one tenant used."""

    requests: int = 0
    rejections: int = 0
    queue_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


class RouterMetrics:
    """One registry, one event loop, no locks."""

    def __init__(
        self,
        *,
        version: str = "",
        max_label_values: int = 1000,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = version
        self.now = now
        self.requests = Tally()  # (model, route, code, stream)
        self.tokens = Tally()  # (model, kind)
        self.signals = SignalCounts()
        self.process = ProcessCounts()
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.pools: dict[str, PoolCounts] = {}
        self.endpoints: dict[str, EndpointCounts] = {}
        self.discoveries: dict[str, DiscoveryCounts] = {}
        self.tenants: dict[str, TenantCounts] = {}
        self._model_labels = LabelSet(max_label_values)
        self._tenant_labels = LabelSet(max_label_values)
        self._sources: list[Callable[[], Iterable[Metric]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- counting

    def pool(self, name: str) -> PoolCounts:
        """Hold on to it; names come from configuration and discovery, never from clients."""
        counts = self.pools.get(name)
        if counts is None:
            counts = self.pools[name] = PoolCounts()
        return counts

    def endpoint(self, id_: str, *, pool: str) -> EndpointCounts:
        counts = self.endpoints.get(id_)
        if counts is None:
            counts = self.endpoints[id_] = EndpointCounts(pool)
        return counts

    def forget_endpoint(self, id_: str) -> None:
        """Its series end with it: a thousand replaced pods leave nothing behind."""
        self.endpoints.pop(id_, None)

    def discovery(self, source: str) -> DiscoveryCounts:
        counts = self.discoveries.get(source)
        if counts is None:
            counts = self.discoveries[source] = DiscoveryCounts()
        return counts

    def model_label(self, model: str, *, is_known: bool) -> str:
        """Clients may name anything; only what is served becomes a series."""
        return self._model_labels(model) if is_known else UNKNOWN_MODEL

    def tenant(self, name: str) -> TenantCounts:
        label = self._tenant_labels(name)
        counts = self.tenants.get(label)
        if counts is None:
            counts = self.tenants[label] = TenantCounts()
        return counts

    def finish(self, record: RequestRecord) -> None:
        """Counts a request that is over. Hot path: once per request."""
        model = self.model_label(record.model, is_known=record.is_known_model)
        stream = "true" if record.is_stream else "false"
        self.requests.add(model, record.route, str(record.status), stream)
        if record.prompt_tokens or record.output_tokens:
            self._count_tokens(record, model)
        if record.tenant:
            self._count_tenant(record)
        if record.pool:
            self._count_pool(record, self.pool(record.pool))

    def _count_tokens(self, record: RequestRecord, model: str) -> None:
        tokens = self.tokens
        tokens.add(model, "prompt", by=record.prompt_tokens)
        tokens.add(model, "output", by=record.output_tokens)
        if record.cached_tokens:
            tokens.add(model, "cached", by=record.cached_tokens)

    def _count_tenant(self, record: RequestRecord) -> None:
        tenant = self.tenant(record.tenant)
        tenant.requests += 1
        tenant.rejections += record.status in (429, 503)
        tenant.queue_s += record.queue_s
        tenant.prompt_tokens += record.prompt_tokens
        tenant.output_tokens += record.output_tokens

    def _count_pool(self, record: RequestRecord, pool: PoolCounts) -> None:
        pool.last_request_at = self.now()
        pool.duration.observe(record.duration_s)
        pool.queue_wait.observe(record.queue_s)
        pool.request_bytes.observe(record.request_bytes)
        pool.response_bytes.observe(record.response_bytes)
        if record.outcome == "client_gone":
            pool.client_disconnects += 1
        elif record.status >= 400 and record.code and not record.attempts:
            pool.rejections.add(record.code)
        if record.attempts:
            pool.pick.observe(record.pick_s)
            self._count_revision(record, pool)
            if record.attempts > 1:
                self._count_repeats(record, pool)
        if record.ttft_s is not None:
            self._count_latency(record, pool, record.ttft_s)
        if record.cached_tokens is not None:
            pool.queried_tokens += record.prompt_tokens
            pool.predicted_tokens += record.predicted_tokens
            pool.cached_tokens += record.cached_tokens
            pool.prediction_error.observe(abs(record.cached_tokens - record.predicted_tokens))

    def _count_repeats(self, record: RequestRecord, pool: PoolCounts) -> None:
        pool.retries += record.attempts - 1 - record.resumes
        pool.retries_exhausted += record.is_error
        if record.resumes:
            pool.resumes.add(record.outcome, by=record.resumes)

    def _count_revision(self, record: RequestRecord, pool: PoolCounts) -> None:
        revision = pool.revision(record.revision)
        revision.requests += 1
        revision.errors += record.is_error
        if record.ttft_s is not None:
            revision.ttft.observe(record.ttft_s)
            if record.last_token_s is not None and record.output_tokens > 1:
                revision.itl_s_sum += record.last_token_s - record.ttft_s
                revision.itl_count += record.output_tokens - 1

    def _count_latency(self, record: RequestRecord, pool: PoolCounts, ttft_s: float) -> None:
        pool.ttft.observe(ttft_s)
        if record.last_token_s is not None and record.output_tokens > 1:
            pool.tpot.observe((record.last_token_s - ttft_s) / (record.output_tokens - 1))

    # -- exposing

    def add_source(self, gauges: Callable[[], Iterable[Metric]]) -> None:
        """Gauges that are read at each scrape."""
        self._sources.append(gauges)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: Prometheus text, or OpenMetrics where asked for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from families(self)
        for source in self._sources:
            yield from source()
