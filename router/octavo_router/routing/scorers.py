"""Scorers for profiles: each rates all candidates from 0 (worst) to 1 (best) by one fact.

What is not known scores 0.5: neither a reason to go nor one to stay away. Profiles are for those
who want to say themselves what counts; the default policy needs no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_router.routing.hashing import rank
from octavo_router.routing.pricing import is_sane, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.request import RouteRequest

UNKNOWN = 0.5


class Scorer(Protocol):
    """One score in [0, 1] for each candidate."""

    name: str

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]: ...


class QueueScorer:
    """Few waiting requests, relative to the others. Blind to how long their prompts are."""

    name = "queue"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        return _relative(candidates, lambda endpoint: float(endpoint.load.waiting))


class RunningScorer:
    """Few sequences running, relative to the others. Blind to the queue."""

    name = "running"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        return _relative(candidates, lambda endpoint: float(endpoint.load.running))


class InFlightScorer:
    """Few of this router's own requests there. Blind to other routers' load; never stale."""

    name = "in-flight"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        values = [float(endpoint.in_flight) for endpoint in candidates]
        return _falling(values)


class KvUsageScorer:
    """Free KV memory. Says nothing below saturation; never use it alone."""

    name = "kv-usage"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        return [1.0 - e.load.kv_usage if _is_reported(e) else UNKNOWN for e in candidates]


class PrefixScorer:
    """The share of the prompt that is cached. Needs a load scorer beside it."""

    name = "prefix"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        total = max(request.prompt_tokens, 1)
        return [min(tokens / total, 1.0) for tokens in matched]


class WaitScorer:
    """A short expected wait, relative to the others: the default policy's cost as a score."""

    name = "wait"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        waits = [
            seconds(endpoint, request.prompt_tokens - tokens)
            for endpoint, tokens in zip(candidates, matched, strict=True)
        ]
        return _falling(waits)


class AdapterScorer:
    """Has the request's LoRA adapter loaded, else how few others it has. Moot without adapters."""

    name = "adapter"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        if not request.adapter:
            return [UNKNOWN] * len(candidates)
        fewest = _falling([float(len(endpoint.adapters)) for endpoint in candidates])
        return [
            1.0 if request.adapter in endpoint.adapters else 0.5 * few
            for endpoint, few in zip(candidates, fewest, strict=True)
        ]


class ZoneScorer:
    """In the router's own zone. Needs a load scorer beside it."""

    name = "zone"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        return [UNKNOWN if e.is_near is None else float(e.is_near) for e in candidates]


class SessionAffinity:
    """The endpoint that the session hashes to. Moves a share of all sessions with each change."""

    name = "session"

    def score(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[float]:
        if not request.session:
            return [UNKNOWN] * len(candidates)
        key = request.session.encode("utf-8", "surrogatepass")
        ranks = [rank(key, endpoint.id) for endpoint in candidates]
        highest = max(ranks)
        return [1.0 if value == highest else 0.0 for value in ranks]


SCORERS: dict[str, Callable[[], Scorer]] = {
    kind.name: kind
    for kind in (
        QueueScorer,
        RunningScorer,
        InFlightScorer,
        KvUsageScorer,
        PrefixScorer,
        WaitScorer,
        AdapterScorer,
        ZoneScorer,
        SessionAffinity,
    )
}


def _is_reported(endpoint: Endpoint) -> bool:
    return endpoint.load_at is not None and is_sane(endpoint.load)


def _relative(candidates: Sequence[Endpoint], value: Callable[[Endpoint], float]) -> list[float]:
    reported = [value(endpoint) for endpoint in candidates if _is_reported(endpoint)]
    scores = iter(_falling(reported))
    return [next(scores) if _is_reported(endpoint) else UNKNOWN for endpoint in candidates]


def _falling(values: Sequence[float]) -> list[float]:
    """1 for the lowest, 0 for the highest; 1 for all when they are equal."""
    if not values:
        return []
    low, high = min(values), max(values)
    if high == low:
        return [1.0] * len(values)
    return [(high - value) / (high - low) for value in values]
