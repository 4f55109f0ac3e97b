"""Policies that do not look at the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.routing.pricing import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Scores
    from octavo_router.routing.request import RouteRequest


class LeastLoad:
    """The least work waiting. Not where prompts share prefixes: it computes them everywhere."""

    name = "least-load"
    reason = "least work there"
    places_adapters = False

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        best, at = float("inf"), 0
        for i, endpoint in enumerate(candidates):
            price = seconds(endpoint, 1)
            if price < best:
                best, at = price, i
            elif price == best and endpoint.last_pick < candidates[at].last_pick:
                at = i
        return at

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        return [{"expected_wait_s": seconds(endpoint, 1)} for endpoint in candidates]


class RoundRobin:
    """One after the other. Not where requests differ in size, or engines in speed."""

    name = "round-robin"
    reason = "the next in turn"
    places_adapters = False

    def __init__(self) -> None:
        self._count = -1

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        self._count += 1
        return self._count % len(candidates)

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        turn = (self._count + 1) % len(candidates)
        return [
            {"turns_until": float((i - turn) % len(candidates))} for i in range(len(candidates))
        ]


class _ByChance:
    places_adapters = False

    def __init__(self, rng: Random) -> None:
        self._rng = rng


class RandomChoice(_ByChance):
    """Anyone. For comparisons only: every other policy beats it."""

    name = "random"
    reason = "chance"

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        return int(self._rng.random() * len(candidates))

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        return [{"probability": 1 / len(candidates)} for _ in candidates]


class PowerOfTwo(_ByChance):
    """The less loaded of two taken at random. For many routers with signals that lag; a single
    router that sees all load loses a little to least-load."""

    name = "power-of-two"
    reason = "the less loaded of two"

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        count = len(candidates)
        if count == 1:
            return 0
        one = int(self._rng.random() * count)
        other = (one + 1 + int(self._rng.random() * (count - 1))) % count
        return one if seconds(candidates[one], 1) <= seconds(candidates[other], 1) else other

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        return [{"expected_wait_s": seconds(endpoint, 1)} for endpoint in candidates]
