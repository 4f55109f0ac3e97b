"""A policy put together from parts: filters leave some, scorers rate them, one is picked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.filters import Filter
    from octavo_router.routing.policies import Scores
    from octavo_router.routing.request import RouteRequest
    from octavo_router.routing.scorers import Scorer


class CandidatePicker(Protocol):
    """Chooses by total scores."""

    name: str

    def pick(self, candidates: Sequence[Endpoint], totals: Sequence[float]) -> int: ...


class MaxScore:
    """The highest; of equal ones, who was picked longest ago. Herds where scores are stale."""

    name = "max"

    def pick(self, candidates: Sequence[Endpoint], totals: Sequence[float]) -> int:
        return max(range(len(candidates)), key=lambda i: (totals[i], -candidates[i].last_pick))


class WeightedRandom:
    """By chance, in proportion to the score. Wastes cache hits; forgives stale scores."""

    name = "weighted-random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Endpoint], totals: Sequence[float]) -> int:
        whole = sum(totals)
        if whole <= 0.0:
            return int(self._rng.random() * len(candidates))
        mark = self._rng.random() * whole
        for i, total in enumerate(totals):
            mark -= total
            if mark < 0.0:
                return i
        return len(candidates) - 1


class Anyone:
    """By chance among those that the filters left. The scores do not count."""

    name = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Endpoint], totals: Sequence[float]) -> int:
        return int(self._rng.random() * len(candidates))


class ScoringProfile:
    """Filter, score, pick. Needs weights, and weights need measuring: prefix-load has none."""

    places_adapters = False

    def __init__(
        self,
        name: str,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: CandidatePicker,
    ) -> None:
        self.name = name
        self.reason = f"profile {name}: {picker.name} of the weighted scores"
        self._filters = tuple(filters)
        self._scorers = tuple(scorers)
        self._picker = picker

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        places = self._filter(request, candidates, matched)
        kept = [candidates[i] for i in places]
        tokens = [matched[i] for i in places]
        totals = [0.0] * len(kept)
        for scorer, weight in self._scorers:
            for i, score in enumerate(scorer.score(request, kept, tokens)):
                totals[i] += weight * score
        return places[self._picker.pick(kept, totals)]

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        places = self._filter(request, candidates, matched)
        kept = [candidates[i] for i in places]
        tokens = [matched[i] for i in places]
        scores: Scores = [{"is_kept": 0.0} for _ in candidates]
        for i in places:
            scores[i] = {"is_kept": 1.0, "total": 0.0}
        for scorer, weight in self._scorers:
            for i, score in zip(places, scorer.score(request, kept, tokens), strict=True):
                scores[i][scorer.name] = score
                scores[i]["total"] += weight * score
        return scores

    def _filter(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[int]:
        places = list(range(len(candidates)))
        for one in self._filters:
            kept = one.keep(request, [candidates[i] for i in places], [matched[i] for i in places])
            if kept:  # a filter that leaves nobody has nothing to say
                places = [places[i] for i in kept]
        return places
