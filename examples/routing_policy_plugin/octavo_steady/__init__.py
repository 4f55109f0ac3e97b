"""The policy `steady`: each tenant has an engine, as long as that engine keeps up."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Scores
    from octavo_router.routing.request import RouteRequest

LONG_PREFIX_TOKENS = 512


class SteadyTenants:
    """Called once by the router, and then for each request."""

    name = "steady"
    reason = ""
    places_adapters = False

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        best = max(range(len(candidates)), key=lambda i: matched[i])
        if matched[best] >= LONG_PREFIX_TOKENS:
            self.reason = "the longest cached prefix"
            return best
        ranks = [_rank(request.tenant, endpoint.id) for endpoint in candidates]
        own = max(range(len(candidates)), key=ranks.__getitem__)
        if candidates[own].load.waiting <= max(candidates[own].max_num_seqs, 1):
            self.reason = "the tenant's own engine"
            return own
        self.reason = "the tenant's own engine is busy: the shortest queue"
        return min(range(len(candidates)), key=lambda i: candidates[i].load.waiting)

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        return [
            {
                "matched_tokens": float(tokens),
                "rank": _rank(request.tenant, endpoint.id),
                "waiting": float(endpoint.load.waiting),
            }
            for endpoint, tokens in zip(candidates, matched, strict=True)
        ]


def _rank(tenant: str, endpoint: str) -> float:
    """The same on every router, for the same two names."""
    digest = blake2b(f"{tenant}\0{endpoint}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest()) / 2**64
