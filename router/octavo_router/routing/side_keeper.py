"""Measures both sides of each pool and carries out what `sides.decide_sides` says.

An engine changes sides in this router alone and at once: new prompts and answers are placed
otherwise from then on, and what it has goes on where it is. Several routers see the same reports
and come to the same decision within seconds; meanwhile they may place differently, and nothing is
lost by that.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from octavo_router.routing.prefill_decode import PrefillDecode
from octavo_router.routing.sides import EngineLoad, SideDemand, decide_sides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint, Role
    from octavo_router.endpoints.registry import Registry
    from octavo_router.routing.policies import Policies

logger = logging.getLogger("octavo.router")

MEASURE_S: Final = 5.0  # over which demand is averaged


@dataclass(slots=True)
class _Measured:
    """Of the engines of one revision of a pool."""

    at: float
    work: dict[str, int] = field(default_factory=dict)  # tokens computed and queued, by engine
    came: float = 0.0  # tokens a second, weighted; `weight` is what they would come to at 1
    weight: float = 0.0
    step_s: dict[str, float] = field(default_factory=dict)  # while sequences run, by engine
    changed_at: float = -math.inf


class SideKeeper:
    """One for a router. `tick` wants to be called about once a second."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._measured: dict[tuple[str, str], _Measured] = {}
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
        self._measured = {key: one for key, one in self._measured.items() if key in groups}

    def _decide(
        self, key: tuple[str, str], engines: Sequence[Endpoint], policy: PrefillDecode, now: float
    ) -> None:
        assert policy.targets is not None
        measured = self._measure(key, engines, now)
        loads = [
            EngineLoad(
                one.id, one.role == "prefill", one.load.running, one.load.queued_tokens,
                one.token_s, measured.step_s.get(one.id, 0.0),
            )
            for one in engines
        ]  # fmt: skip
        change = decide_sides(
            loads,
            SideDemand(measured.came / (measured.weight or 1.0), policy.prompt_tokens),
            policy.targets,
            since_change_s=now - measured.changed_at,
        )
        if change is None:
            return
        measured.changed_at = now
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

    def _measure(self, key: tuple[str, str], engines: Sequence[Endpoint], now: float) -> _Measured:
        """Prompt tokens that came lately: those computed, and those that are queued more."""
        measured = self._measured.setdefault(key, _Measured(now))
        elapsed_s = now - measured.at
        if elapsed_s <= 0.0:
            return measured
        work = {one.id: one.load.computed_tokens + one.load.queued_tokens for one in engines}
        came = sum(
            tokens - measured.work[id_] for id_, tokens in work.items() if id_ in measured.work
        )
        weight = 1.0 - math.exp(-elapsed_s / MEASURE_S)
        if measured.work:
            measured.came += weight * (max(came, 0) / elapsed_s - measured.came)
            measured.weight += weight * (1.0 - measured.weight)
        measured.work, measured.at = work, now
        for one in engines:
            step_s = one.load.step_s
            if one.role == "prefill":
                measured.step_s.pop(one.id, None)  # of prompts: it says nothing of answers
            elif one.load.running and step_s > 0.0:
                before = measured.step_s.get(one.id, step_s)
                measured.step_s[one.id] = before + weight * (step_s - before)
        return measured

    def _put(self, endpoint: Endpoint, side: Role | None) -> None:
        if endpoint.side != side:
            endpoint.side = side
            self._registry.changed(endpoint)
