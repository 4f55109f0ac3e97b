"""What the operator counts about itself: plain numbers, put into Prometheus' form on scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Outcome: TypeAlias = Literal["done", "failed", "gone"]
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

RECONCILES = "octavo_operator_reconciles"
RECONCILE_SECONDS = "octavo_operator_reconcile_seconds"
QUEUE_DEPTH = "octavo_operator_queue_depth"
API_CALLS = "octavo_operator_api_calls"
API_ERRORS = "octavo_operator_api_errors"
EVENTS_RECEIVED = "octavo_operator_watch_events"
WATCH_AGE_SECONDS = "octavo_operator_watch_age_seconds"
IS_LEADER = "octavo_operator_is_leader"
OBJECTS = "octavo_operator_objects"
DEPLOYMENTS = "octavo_operator_llmdeployments"
BUGS = "octavo_operator_bugs"
ROUTERS = "octavo_operator_routers"
ROUTER_ERRORS = "octavo_operator_router_errors"


class OperatorMetrics:
    """Confined to the event loop."""

    def __init__(self) -> None:
        self.queue_depth = 0
        self.bugs = 0
        self.is_leader = False
        self.num_objects = 0
        self.num_deployments = 0
        self.num_routers = 0
        self.watch_age_s = 0.0
        self.outcomes: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()  # verb, kind
        self.errors: Counter[tuple[str, str]] = Counter()  # verb, error
        self.watch_events: Counter[str] = Counter()
        self.router_errors: Counter[str] = Counter()
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    @property
    def num_reconciles(self) -> int:
        return sum(self.outcomes.values())

    def reconciled(self, outcome: Outcome, took_s: float) -> None:
        self.outcomes[outcome] += 1
        self._buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self._seconds += took_s

    def render(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _gauge(QUEUE_DEPTH, "Keys that wait for a reconcile.", self.queue_depth)
        yield from _gauge(IS_LEADER, "1 while this replica holds the Lease.", int(self.is_leader))
        yield from _gauge(OBJECTS, "Objects in memory.", self.num_objects)
        yield from _gauge(DEPLOYMENTS, "LLMDeployments in memory.", self.num_deployments)
        yield from _gauge(ROUTERS, "Router replicas that answer.", self.num_routers)
        yield from _gauge(
            WATCH_AGE_SECONDS, "Since the watches last proved to be alive.", self.watch_age_s
        )
        yield from _head(BUGS, "Reconciles ended by an unexpected exception.", "counter")
        yield f"{BUGS}_total {self.bugs}"
        yield from _head(RECONCILES, "Reconciles by outcome.", "counter")
        for name in ("done", "failed", "gone"):
            yield f'{RECONCILES}_total{{outcome="{name}"}} {self.outcomes[name]}'
        yield from _head(API_CALLS, "Requests to the API server.", "counter")
        for (verb, kind), count in sorted(self.calls.items()):
            yield f'{API_CALLS}_total{{verb="{verb}",kind="{kind}"}} {count}'
        yield from _head(API_ERRORS, "Requests that failed.", "counter")
        for (verb, error), count in sorted(self.errors.items()):
            yield f'{API_ERRORS}_total{{verb="{verb}",error="{error}"}} {count}'
        yield from _head(ROUTER_ERRORS, "Failed reads of routers' states.", "counter")
        for reason, count in sorted(self.router_errors.items()):
            yield f'{ROUTER_ERRORS}_total{{reason="{reason}"}} {count}'
        yield from _head(EVENTS_RECEIVED, "Watch events by kind.", "counter")
        for kind, count in sorted(self.watch_events.items()):
            yield f'{EVENTS_RECEIVED}_total{{kind="{kind}"}} {count}'
        yield from _head(RECONCILE_SECONDS, "Duration of a reconcile.", "histogram")
        total = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            yield f'{RECONCILE_SECONDS}_bucket{{le="{bound}"}} {total}'
        yield f"{RECONCILE_SECONDS}_sum {self._seconds:.6f}"
        yield f"{RECONCILE_SECONDS}_count {total}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    family = f"{name}_total" if kind == "counter" else name
    return f"# HELP {family} {text}", f"# TYPE {family} {kind}"


def _gauge(name: str, text: str, value: float) -> tuple[str, str, str]:
    return *_head(name, text, "gauge"), f"{name} {value:g}"
