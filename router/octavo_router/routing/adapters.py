"""The policy for engines that load LoRA adapters when the first request names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.routing.pricing import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Policy, Scores
    from octavo_router.routing.request import RouteRequest

LOAD_TOKENS = 4096  # what loading an adapter costs, in prompt tokens
CROWD_TOKENS = 128  # what each adapter that is already there makes the next one cost more


class LoraAffinity:
    """Where its adapter is loaded, unless the queue there is worse than loading it elsewhere.

    Not for engines that cannot load adapters on demand: those without it would answer 404. Other
    policies send a request with an adapter only to endpoints that have it.
    """

    name = "lora-affinity"
    places_adapters = True

    def __init__(self, otherwise: Policy) -> None:
        self.reason = ""
        self._otherwise = otherwise

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        if not request.adapter:
            at = self._otherwise.pick(request, candidates, matched)
            self.reason = self._otherwise.reason
            return at
        best, at = float("inf"), 0
        for i, endpoint in enumerate(candidates):
            price = self._price(request, endpoint, matched[i])
            if price < best:
                best, at = price, i
            elif price == best and endpoint.last_pick < candidates[at].last_pick:
                at = i
        has_it = request.adapter in candidates[at].adapters
        self.reason = "has the adapter" if has_it else "will load the adapter soonest"
        return at

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        return [
            {
                "expected_wait_s": self._price(request, endpoint, tokens),
                "has_adapter": float(request.adapter in endpoint.adapters),
            }
            for endpoint, tokens in zip(candidates, matched, strict=True)
        ]

    def _price(self, request: RouteRequest, endpoint: Endpoint, matched_tokens: int) -> float:
        uncached = request.prompt_tokens - matched_tokens
        if not request.adapter or request.adapter in endpoint.adapters:
            return seconds(endpoint, uncached)
        extra = LOAD_TOKENS + CROWD_TOKENS * len(endpoint.adapters)
        return seconds(endpoint, max(uncached, 1) + extra)
