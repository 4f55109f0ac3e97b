"""What the router counts, and how it is exposed."""

from octavo_router.metrics.counts import (
    DiscoveryCounts,
    EndpointCounts,
    LabelledCounter,
    PoolCounts,
    ProcessCounts,
    RevisionCounts,
    SignalCounts,
)
from octavo_router.metrics.histogram import Histogram
from octavo_router.metrics.record import RequestRecord
from octavo_router.metrics.router_metrics import RouterMetrics

__all__ = [
    "DiscoveryCounts",
    "EndpointCounts",
    "Histogram",
    "LabelledCounter",
    "PoolCounts",
    "ProcessCounts",
    "RequestRecord",
    "RevisionCounts",
    "RouterMetrics",
    "SignalCounts",
]
