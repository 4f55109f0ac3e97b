"""Measures both sides of each pool and carries out what `sides.follow_sides` says.

An engine changes sides in this router alone and at once: new prompts and answers are placed
otherwise from then on, and what it has goes on where it is. Several routers see the same reports
and come to the same decision within seconds; meanwhile they may place differently, and nothing is
lost by that. Pods of an LLMDeployment are the operator's to move: see its decide/flip.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo_engine.protocol.sides import EngineReport, SideHistory, SideLimits, follow_sides
from octavo_router.routing.prefill_decode import PrefillDecode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint, Role
    from octavo_router.endpoints.registry import Registry
    from octavo_router.routing.policies import Policies

logger = logging.getLogger("octavo.router")


class SideKeeper:
    """One for a router. `tick` wants to be called about once a second."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._histories: dict[tuple[str, str], SideHistory] = {}
        self.reasons: dict[str, str] = {}  # of the last change, by pool
        self.num_changes: dict[tuple[str, ...], float] = {}  # by pool and side changed to

    def tick(self, policies: Policies, now: float) -> None:
        groups: set[tuple[str, str]] = set()
        for pool in self._registry.pools:
            policy = policies.of(pool)
            members = [one for one in self._registry.pool(pool) if one.can_change_sides]
            if not isinstance(policy, PrefillDecode) or policy.targets is None:
                for endpoint in members:
                    self._put(endpoint, None)
                continue
            for revision in {one.spec.revision for one in members}:
                groups.add((pool, revision))
                engines = [one for one in members if one.spec.revision == revision]
                self._decide((pool, revision), engines, policy, now)
        self._histories = {key: one for key, one in self._histories.items() if key in groups}

    def _decide(
        self, key: tuple[str, str], engines: Sequence[Endpoint], policy: PrefillDecode, now: float
    ) -> None:
        assert policy.targets is not None
        reports = [
            EngineReport(
                one.id, one.role == "prefill", one.load.running, one.load.queued_tokens,
                one.load.computed_tokens, one.token_s, one.load.step_s,
            )
            for one in engines
        ]  # fmt: skip
        self._histories[key], change = follow_sides(
            self._histories.get(key) or SideHistory(now),
            reports,
            policy.prompt_tokens,
            policy.targets,
            SideLimits(),
            now,
        )
        if change is None:
            return
        pool = key[0]
        self.reasons[pool] = change.reason
        logger.info("Engines of the pool %s change sides: %s", pool, change.reason)
        by_id = {one.id: one for one in engines}
        turns: tuple[tuple[Role, tuple[str, ...]], ...] = (
            ("prefill", change.to_prompts), ("decode", change.to_answers),
        )  # fmt: skip
        for side, ids in turns:
            for id_ in ids:
                self.num_changes[pool, side] = self.num_changes.get((pool, side), 0) + 1
                self._put(by_id[id_], side)

    def _put(self, endpoint: Endpoint, side: Role | None) -> None:
        if endpoint.side != side:
            endpoint.side = side
            self._registry.changed(endpoint)
