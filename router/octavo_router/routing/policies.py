"""What a policy is, and which one a pool has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.request import RouteRequest

Scores = list[dict[str, float]]  # by candidate; what the numbers mean is in their names


class Policy(Protocol):
    """Chooses one of the candidates. Synchronous, on the event loop, once per request.

    `matched` says how many of the prompt's tokens lie in each candidate's memory, or are being
    computed there. Reads the endpoints, changes nothing about them; may keep state of its own.
    """

    name: str
    reason: str  # why the last pick fell as it did, in words
    places_adapters: bool  # candidates without the request's adapter are shown to it too

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        """The place of the chosen one. `candidates` is never empty."""

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        """The numbers it decides by, without deciding."""


class Policies:
    """The default policy and those of single pools."""

    __slots__ = ("by_pool", "default")

    def __init__(self, default: Policy, by_pool: Mapping[str, Policy] | None = None) -> None:
        self.default = default
        self.by_pool = dict(by_pool or {})

    def of(self, pool: str) -> Policy:
        return self.by_pool.get(pool, self.default)
