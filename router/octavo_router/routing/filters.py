"""Filters: who may serve a request at all. One that would leave nobody is skipped or decides alone.

`narrow` is what no request gets around; the classes are for profiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.request import RouteRequest


def narrow(
    request: RouteRequest,
    endpoints: Sequence[Endpoint],
    slots: Sequence[int],
    exclude: Collection[Endpoint],
    adapter: str,
) -> tuple[list[Endpoint], list[int]]:
    """Those that are not excluded, are in the subset, and have (or may load) the adapter."""
    kept = [endpoint for endpoint in endpoints if endpoint not in exclude]
    if request.subset:
        subset = request.subset
        kept = [endpoint for endpoint in kept if endpoint.spec.address.authority in subset]
    if adapter:
        # No endpoint has it: the chosen one must load it, or answer that it cannot.
        kept = [endpoint for endpoint in kept if adapter in endpoint.adapters] or kept
    slot_of = dict(zip(map(id, endpoints), slots, strict=True))
    return kept, [slot_of[id(endpoint)] for endpoint in kept]


class Filter(Protocol):
    """Keeps some candidates, by their places. Keeping none means it has nothing to say."""

    name: str

    def keep(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]: ...


class NotSaturated:
    """Drops endpoints that would refuse. Not needed behind a gate that queues."""

    name = "not-saturated"

    def __init__(self, threshold: float = 0.0) -> None:
        del threshold

    def keep(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]:
        return [i for i, e in enumerate(candidates) if not e.load.is_saturated]


class HasAdapter:
    """Keeps endpoints that have the request's adapter loaded. Not for pools without adapters."""

    name = "has-adapter"

    def __init__(self, threshold: float = 0.0) -> None:
        del threshold

    def keep(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]:
        if not request.adapter:
            return []
        return [i for i, e in enumerate(candidates) if request.adapter in e.adapters]


class MaxWaiting:
    """Drops endpoints with more than `threshold` sequences waiting. A cliff: prefer a scorer."""

    name = "max-waiting"

    def __init__(self, threshold: float = 10.0) -> None:
        self.threshold = threshold

    def keep(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]:
        return [i for i, e in enumerate(candidates) if e.load.waiting <= self.threshold]


class PrefixAtLeast:
    """Keeps endpoints that hold at least a `threshold` share of the prompt.

    Not on its own: it sends everybody with a hot prefix to one place. Pair it with a load scorer.
    """

    name = "prefix-at-least"

    def __init__(self, threshold: float = 0.8) -> None:
        self.threshold = threshold

    def keep(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]:
        needed = self.threshold * max(request.prompt_tokens, 1)
        return [i for i, tokens in enumerate(matched) if tokens >= needed]


FILTERS: dict[str, type[NotSaturated | HasAdapter | MaxWaiting | PrefixAtLeast]] = {
    kind.name: kind for kind in (NotSaturated, HasAdapter, MaxWaiting, PrefixAtLeast)
}
