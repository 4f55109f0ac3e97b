"""Policies of other packages: made when the configuration names one, and never trusted blindly.

The entry point is called without arguments and returns a `Policy`. Where it raises, or picks
nobody, the default policy decides that request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.routing.policies import Policy, Scores
    from octavo_router.routing.request import RouteRequest

logger = logging.getLogger(__name__)


def load_policy(point: EntryPoint, fallback: Policy) -> PluginPolicy:
    """Raises ConfigInvalid where the package cannot be imported or its policy cannot be made."""
    where = f"policy {point.name!r} ({point.value})"
    try:
        policy = point.load()()
    except Exception as error:  # the plug-in's own code: anything may happen
        raise ConfigInvalid("routing.policy", f"{where} cannot be loaded: {error!r}") from error
    missing = [
        name
        for name in ("name", "reason", "places_adapters", "pick", "explain")
        if not hasattr(policy, name)
    ]
    if missing:
        raise ConfigInvalid("routing.policy", f"{where} has no {', '.join(missing)}")
    return PluginPolicy(point.name, policy, fallback)


class PluginPolicy:
    """Calls a package's policy. Each kind of fault is logged once."""

    def __init__(self, name: str, policy: Policy, fallback: Policy) -> None:
        self.name = name
        self.reason = policy.reason
        self.places_adapters = bool(policy.places_adapters)
        self._policy = policy
        self._fallback = fallback
        self._logged: set[str] = set()

    def pick(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> int:
        try:
            place = self._policy.pick(request, candidates, matched)
            if type(place) is int and 0 <= place < len(candidates):
                self.reason = str(self._policy.reason)
                return place
            fault = f"it picked {place!r} of {len(candidates)} candidates"
            self._log(fault, is_exception=False)
        except Exception as error:  # the plug-in's own code: anything may happen
            fault = type(error).__name__
            self._log(fault, is_exception=True)
        place = self._fallback.pick(request, candidates, matched)
        self.reason = f"{self.name} failed ({fault}); {self._fallback.reason}"
        return place

    def explain(
        self, request: RouteRequest, candidates: Sequence[Endpoint], matched: Sequence[int]
    ) -> Scores:
        try:
            scores = [
                {str(name): float(value) for name, value in one.items()}
                for one in self._policy.explain(request, candidates, matched)
            ]
            if len(scores) == len(candidates):
                return scores
            fault = f"it explained {len(scores)} of {len(candidates)} candidates"
            self._log(fault, is_exception=False)
        except Exception as error:  # the plug-in's own code: anything may happen
            self._log(type(error).__name__, is_exception=True)
        return [{} for _ in candidates]

    def _log(self, fault: str, *, is_exception: bool) -> None:
        if fault not in self._logged and len(self._logged) < 100:
            self._logged.add(fault)
            logger.error(
                "The policy %s failed, %s decides: %s", self.name, self._fallback.name, fault,
                exc_info=is_exception,
            )  # fmt: skip
