"""The default policy: the lowest price; a cached prefix is work that need not be done.

One cost in one unit, seconds (routing.pricing): queue and cache are not two scores with weights
but two parts of the same wait. Two things are added that a single request's price does not show.

*A hot prefix is worth a copy.* Where `s` other requests in flight share the missing prefix, its
computation elsewhere will serve them too, so each is charged 1 / (1 + s) of it. A prefix that
everybody wants spreads after a few requests; a conversation stays where it is.

*No endpoint runs away.* Nobody takes more than `balance_factor` times the fair share of this
router's requests in flight (above a few), however good its cache: signals may be wrong, prefixes
hostile. An endpoint that has just returned has a smaller share, which grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.residency.underway import num_inner
from octavo_router.routing.pricing import UNCACHED_WEIGHT, note_report, seconds, wait_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.residency.api import Underway
    from octavo_router.routing.policies import Scores
    from octavo_router.routing.request import RouteRequest

LOWEST = "lowest price"
COPY = "lowest price, where a hot prefix gets another copy"
BALANCE = "lowest price of those within their share"

MIN_SHARERS = 2  # a lone neighbour does not make a prefix hot
INFINITE = float("inf")


class PrefixLoad:
    """Not where engines share one cache or keep none: least-load decides the same for less."""

    __slots__ = ("_factor", "_slack", "_underway", "reason")
    name = "prefix-load"
    places_adapters = False

    def __init__(
        self, underway: Underway, *, balance_factor: float = 1.25, balance_slack: int = 8
    ) -> None:
        self.reason = LOWEST
        self._underway = underway
        self._factor = balance_factor
        self._slack = balance_slack

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        # Hot path, so pricing.seconds is written out.
        prompt_tokens = request.prompt_tokens
        best = INFINITE
        at = i = 0
        for endpoint in candidates:
            if endpoint.load is not endpoint.priced:
                note_report(endpoint)
            uncached = prompt_tokens - matched[i]
            if uncached < 1:
                uncached = 1
            work = endpoint.base_tokens + endpoint.own_tokens + UNCACHED_WEIGHT * uncached
            price = work * endpoint.token_s + endpoint.zone_s
            if price < best:
                best = price
                at = i
            elif price == best and endpoint.last_pick < candidates[at].last_pick:
                at = i
            i += 1
        self.reason = LOWEST
        chosen = candidates[at]
        if chosen.in_flight < MIN_SHARERS and chosen.share == 1.0:
            return at
        most = matched[at]
        sharers = 0
        if most and min(matched) < most:
            sharers = self._sharers(request, most)
        if sharers < MIN_SHARERS and chosen.in_flight < self._slack and chosen.share >= 1.0:
            return at  # whatever the others have in flight
        total = sum([endpoint.in_flight for endpoint in candidates])
        if sharers < MIN_SHARERS and chosen.in_flight < self._limit(chosen, total, i):
            return at
        return self._balance(request, candidates, matched, at, total, sharers)

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        total = sum(endpoint.in_flight for endpoint in candidates)
        return [
            {
                "price_s": seconds(endpoint, request.prompt_tokens - tokens),
                "expected_wait_s": wait_s(endpoint, request.prompt_tokens - tokens),
                "reported_work_tokens": endpoint.base_tokens,
                "own_work_tokens": endpoint.own_tokens,
                "uncached_tokens": max(1, request.prompt_tokens - tokens),
                "token_s": endpoint.token_s,
                "zone_s": endpoint.zone_s,
                "max_in_flight": self._limit(endpoint, total, len(candidates)),
            }
            for endpoint, tokens in zip(candidates, matched, strict=True)
        ]

    def _balance(
        self,
        request: RouteRequest,
        candidates: Sequence[Endpoint],
        matched: Sequence[int],
        first: int,
        total: int,
        sharers: int,
    ) -> int:
        """Look again, with a hot prefix's price shared and overfull endpoints left out."""
        most = matched[first]
        prompt_tokens = request.prompt_tokens
        is_hot = sharers >= MIN_SHARERS
        divisor = 1 + sharers if is_hot else 1
        fair = self._factor * (total + 1) / sum([endpoint.share for endpoint in candidates])
        limit = max(self._slack, int(fair))
        best, at, i = INFINITE, -1, -1
        for endpoint in candidates:
            i += 1
            if endpoint.in_flight >= limit or (
                endpoint.share < 1.0 and endpoint.in_flight >= max(1, int(endpoint.share * fair))
            ):
                continue
            tokens = matched[i]
            work: float = endpoint.base_tokens + endpoint.own_tokens
            if tokens < most:
                work += UNCACHED_WEIGHT * (most - tokens) / divisor
            elif is_hot and endpoint.pending_tokens:
                # What it computes may be this very prefix: a copy would take as long.
                work -= min(endpoint.pending_tokens, most)
            unique = prompt_tokens - (tokens if tokens > most else most)
            work += UNCACHED_WEIGHT * (unique if unique > 1 else 1)
            price = work * endpoint.token_s + endpoint.zone_s
            if price < best:
                best, at = price, i
            elif price == best and endpoint.last_pick < candidates[at].last_pick:
                at = i
        if at < 0 or at == first:  # all are full: then the lowest price it is
            return first
        self.reason = BALANCE if candidates[first].in_flight >= limit else COPY
        return at

    def _limit(self, endpoint: Endpoint, total: int, count: float) -> int:
        """Requests in flight at which it takes no more; at least one goes everywhere."""
        fair = self._factor * (total + 1) / count
        if endpoint.share < 1.0:
            return max(1, int(endpoint.share * fair))
        return max(self._slack, int(fair))

    def _sharers(self, request: RouteRequest, matched_tokens: int) -> int:
        """Requests in flight that share (about) the part of the prompt that is cached."""
        names = request.names
        if not names:
            return 0
        num_keys = len(request.keys) >> 3
        length = num_keys * matched_tokens // max(request.prompt_tokens, 1)
        # The longest name within that part; the whole prompt's where (nearly) all of it is.
        at = num_inner(length + 1) - 1 if length < num_keys - 1 else len(names) - 1
        return self._underway.sharers(names[max(at, 0)])
