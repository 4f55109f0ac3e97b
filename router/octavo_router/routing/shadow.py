"""Shadow policies: run on a sample of live requests, compared with what was done, never followed.

*Regret* is in expected seconds: the price (routing.pricing) of the live choice minus the price of
the shadow's, for the same request at the same moment. Above zero the shadow would have done better,
as far as the price shows. It does not show what the shadow's own past would have been: caches
and queues are those that the live policy made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo_router.routing.pricing import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Policy
    from octavo_router.routing.request import RouteRequest


@dataclass(slots=True)
class Comparison:
    """Sums over the sampled requests, so that rates and means are differences."""

    num_requests: int = 0
    num_agreed: int = 0  # the same endpoint
    num_better: int = 0  # the shadow's price was lower
    num_worse: int = 0
    regret_s_sum: float = 0.0  # live minus shadow
    matched_tokens_live: int = 0
    matched_tokens_shadow: int = 0


class Shadows:
    """The policies under comparison, by name."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = {policy.name: policy for policy in policies}
        self._comparisons: dict[tuple[str, str], Comparison] = {}  # live, shadow

    def compare(
        self,
        request: RouteRequest,
        live: str,
        candidates: Sequence[Endpoint],
        matched: Sequence[int],
        at: int,
    ) -> dict[str, int]:
        """What each shadow would have picked. Called before the live choice is reserved."""
        price = seconds(candidates[at], request.prompt_tokens - matched[at])
        picks = {}
        for name, policy in self._policies.items():
            if name == live:
                continue
            other = picks[name] = policy.pick(request, candidates, matched)
            sums = self._comparisons.setdefault((live, name), Comparison())
            regret_s = price - seconds(candidates[other], request.prompt_tokens - matched[other])
            sums.num_requests += 1
            sums.num_agreed += other == at
            sums.num_better += regret_s > 0.0
            sums.num_worse += regret_s < 0.0
            sums.regret_s_sum += regret_s
            sums.matched_tokens_live += matched[at]
            sums.matched_tokens_shadow += matched[other]
        return picks

    @property
    def comparisons(self) -> dict[tuple[str, str], Comparison]:
        """By live and shadow policy."""
        return self._comparisons

    def report(self) -> list[dict[str, object]]:
        """The same, JSON-able."""
        return [
            {"live": live, "shadow": shadow, **asdict(sums)}
            for (live, shadow), sums in sorted(self._comparisons.items())
        ]
