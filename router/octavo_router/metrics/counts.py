"""What is counted, as plain numbers on slotted objects: adding to one costs what `+=` costs.

Dictionaries are keyed by label values from closed sets. Whoever counts holds the object (a pool's,
an endpoint's) and never looks one up per request by a client's word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_engine.protocol.state import TTFT_BOUNDS_S
from octavo_router.metrics.histogram import (
    ERROR_BUCKETS,
    LATENCY_BUCKETS,
    PICK_BUCKETS,
    REQUEST_BUCKETS,
    SIZE_BUCKETS,
    Histogram,
)


class LabelledCounter(dict[tuple[str, ...], int]):
    """Counters by label values."""

    def add(self, *labels: str, by: int = 1) -> None:
        self[labels] = self.get(labels, 0) + by


@dataclass(slots=True)
class RevisionCounts:
    """Outcomes of one revision, or of one adapter on trial, in one pool, for protocol.state."""

    requests: int = 0
    errors: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    itl_s_sum: float = 0.0
    itl_count: int = 0


@dataclass(slots=True)
class PoolCounts:
    """One pool, over all of its models and endpoints."""

    running: int = 0
    last_request_at: float | None = None  # monotonic
    duration: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    tpot: Histogram = field(default_factory=lambda: Histogram(LATENCY_BUCKETS))
    queue_wait: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    pick: Histogram = field(default_factory=lambda: Histogram(PICK_BUCKETS))
    request_bytes: Histogram = field(default_factory=lambda: Histogram(SIZE_BUCKETS))
    response_bytes: Histogram = field(default_factory=lambda: Histogram(SIZE_BUCKETS))
    prediction_error: Histogram = field(default_factory=lambda: Histogram(ERROR_BUCKETS))
    queried_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    client_disconnects: int = 0
    retries: int = 0
    retries_exhausted: int = 0
    quarantined: int = 0
    refused: int = 0  # for lack of room
    ejections: int = 0
    adapter_loads: int = 0
    adapter_load_failures: int = 0
    adapter_unloads: int = 0
    rejections: LabelledCounter = field(default_factory=LabelledCounter)  # (reason)
    attempts: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome)
    resumes: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome of the request)
    # (outcome): computed for another engine
    prompts: LabelledCounter = field(default_factory=LabelledCounter)
    state_changes: LabelledCounter = field(default_factory=LabelledCounter)  # (state)
    revisions: dict[str, RevisionCounts] = field(default_factory=dict)
    trials: dict[str, RevisionCounts] = field(default_factory=dict)  # by adapter

    def saw_request(self, at: float) -> None:
        if self.last_request_at is None or self.last_request_at < at:
            self.last_request_at = at

    def revision(self, name: str) -> RevisionCounts:
        counts = self.revisions.get(name)
        if counts is None:
            counts = self.revisions[name] = RevisionCounts()
        return counts

    def trial(self, adapter: str) -> RevisionCounts:
        counts = self.trials.get(adapter)
        if counts is None:
            counts = self.trials[adapter] = RevisionCounts()
        return counts


@dataclass(slots=True)
class EndpointCounts:
    """One endpoint; forgotten with it."""

    pool: str
    picks: LabelledCounter = field(default_factory=LabelledCounter)  # (policy)
    outcomes: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome)


@dataclass(slots=True)
class SignalCounts:
    """What engines reported, over all endpoints."""

    hellos: int = 0
    snapshots: int = 0
    deltas: int = 0
    draining: int = 0
    stored_bytes: int = 0
    evicted_bytes: int = 0
    breaks: LabelledCounter = field(default_factory=LabelledCounter)  # (reason)
    connects: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome)
    polls: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome)
    kv_events: LabelledCounter = field(default_factory=LabelledCounter)  # (type, status)


@dataclass(slots=True)
class DiscoveryCounts:
    """One source of endpoints."""

    updates: int = 0
    errors: int = 0
    relists: int = 0
    heard_at: float | None = None  # monotonic: when the source last answered


@dataclass(slots=True)
class ProcessCounts:
    """This process."""

    loop_stalls: int = 0
    clock_jumps: int = 0
    config_reloads: LabelledCounter = field(default_factory=LabelledCounter)  # (outcome)


@dataclass(slots=True)
class TenantCounts:
    """What one tenant used."""

    requests: int = 0
    rejections: int = 0
    queue_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
