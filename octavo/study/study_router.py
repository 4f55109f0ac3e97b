"""The router of a study: its true registry, index, dispatcher and policies, fed by its own parser
of what engines report. No sockets, no queue before the engines'."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from octavo.study.adapters import SimulatedAdapterCalls
from octavo.study.shapes import POOL
from octavo_engine.protocol.stream import Hello, Snapshot
from octavo_router.adapters.fleet import AdapterFleet
from octavo_router.config.settings import AdapterConfig, PoolConfig, RouterConfig, RoutingConfig
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.metrics.counts import SignalCounts
from octavo_router.routing.build import build_dispatcher
from octavo_router.signals.follow import Follower

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.study.adapters import AdapterSetup
    from octavo.study.engine_models import EngineModel
    from octavo.study.timeline import Timeline
    from octavo_engine.protocol.sides import SideTargets
    from octavo_router.endpoints.endpoint import Endpoint, Role
    from octavo_router.residency.native import HotPath

TICK_S = 1.0


def _routing(policy: str, targets: SideTargets | None) -> RoutingConfig:
    if targets is None:
        return RoutingConfig(policy=policy)
    return RoutingConfig(
        policy=policy,
        prefill_first_token_s=targets.first_token_s,
        prefill_token_s=targets.token_s,
    )


class StudyRouter:
    """Health is left out: it would take slow engines away from policies that make them slow."""

    def __init__(
        self,
        policy: str,
        model: EngineModel,
        timeline: Timeline,
        *,
        num_engines: int,
        seed: int,
        hot_path: HotPath,
        adapters: AdapterSetup | None = None,
        num_prefill: int = 0,
        targets: SideTargets | None = None,
        is_moved: bool = False,
    ) -> None:
        self._index = index = hot_path.ResidencyIndex()
        self.registry = Registry(index)
        self.dispatcher = build_dispatcher(
            RouterConfig(routing=_routing(policy, targets)),
            self.registry,
            index,
            clock=timeline.clock,
            rng=Random(seed),
        )
        self.dispatcher.health = None
        self.adapters: AdapterFleet | None = None
        if adapters is not None:
            self._make_fleet(adapters, timeline)
        self._timeline = timeline
        self._specs = [
            EndpointSpec(
                f"engine-{i}",
                Address(f"10.0.0.{i + 1}", 8000),
                POOL,
                kind="octavo",
                role="prefill" if i < num_prefill else "both",
                is_moved=is_moved,
            )
            for i in range(num_engines)
        ]
        self._hello = Hello(
            epoch="study", model=POOL, names=[POOL], num_blocks=model.sim.kv_blocks,
            max_model_len=model.scheduler.max_model_len,
            max_num_seqs=model.scheduler.max_num_seqs, kv_role="kv_both",
        )  # fmt: skip
        self._counts = SignalCounts()
        self.followers = [self.follow(e) for e in self.registry.replace("study", self._specs).added]
        self._tick()

    @property
    def num_adapter_loads(self) -> int:
        return 0 if self.adapters is None else self.adapter_calls.num_loads

    @property
    def num_side_changes(self) -> int:
        return int(sum(self.dispatcher.sides.num_changes.values()))

    def move(self, sides: Mapping[str, Role]) -> None:
        """Discovery reports engines, by id, on another side than before."""
        self._specs = [replace(s, role=sides.get(s.id, s.role)) for s in self._specs]
        self.registry.replace("study", self._specs)

    def _make_fleet(self, setup: AdapterSetup, timeline: Timeline) -> None:
        self.adapter_calls = SimulatedAdapterCalls(setup, timeline)
        fleet = AdapterFleet(self.registry, self.adapter_calls, clock=timeline.clock)
        self.adapters = self.adapter_calls.fleet = fleet
        configs = tuple(AdapterConfig(name=name, uri=name) for name in setup.names)
        pool = PoolConfig(name=POOL, adapters=configs, adapter_slots=setup.slots)
        fleet.configure((pool,))
        self.dispatcher.on_adapter_idle = fleet.idle

    def follow(self, endpoint: Endpoint) -> Follower:
        """Its engine serves from now on, and nothing is cached there yet."""
        follower = Follower(
            endpoint, self._index, counts=self._counts, set_state=self.registry.report,
            on_changed=self.registry.changed, now=self._timeline.clock,
        )  # fmt: skip
        follower.begin()
        follower.take(self._hello)
        follower.take(Snapshot(b"", last=True))
        return follower

    def _tick(self) -> None:
        self.dispatcher.tick()
        if self.adapters is not None:
            self.adapters.tick()
        self._timeline.after(TICK_S, self._tick)
