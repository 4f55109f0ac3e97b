"""Adapters in a study: who asks for which, and engines that take their time to load them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from octavo.study.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.study.timeline import Timeline
    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.endpoints.endpoint import Endpoint

UNLOAD_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """What engines can hold, and how long a load takes."""

    num_adapters: int
    slots: int = 16  # of one engine
    load_s: float = 0.05

    @property
    def names(self) -> list[str]:
        return [f"adapter-{number}" for number in range(self.num_adapters)]


def with_adapters(workload: Workload, setup: AdapterSetup, *, zipf: float, seed: int) -> Workload:
    """The same requests, each for an adapter: the n-th is requested 1 / n**zipf times as often as
    the first."""
    rng = Random(f"adapters/{seed}")
    names = setup.names
    weights = list(accumulate(rank**-zipf for rank in range(1, len(names) + 1)))
    arrivals = tuple(
        replace(arrival, adapter=rng.choices(names, cum_weights=weights)[0])
        for arrival in workload.arrivals
    )
    return Workload(f"{workload.name}, {len(names):,} adapters", arrivals)


class SimulatedAdapterCalls:
    """Engines that load one adapter after another. Set `fleet` before the first call."""

    fleet: AdapterFleet

    def __init__(self, setup: AdapterSetup, timeline: Timeline) -> None:
        self.num_loads = 0
        self._setup = setup
        self._timeline = timeline
        self._free_at: dict[str, float] = {}  # by engine

    def load(self, endpoint: Endpoint, name: str, uri: str, *, in_place: bool) -> None:
        self.num_loads += 1
        now = self._timeline.now
        at = max(now, self._free_at.get(endpoint.id, 0.0)) + self._setup.load_s
        self._free_at[endpoint.id] = at
        self._timeline.after(at - now, lambda: self.fleet.loaded(endpoint, name))

    def unload(self, endpoint: Endpoint, name: str, then: Callable[[], None]) -> None:
        def end() -> None:
            self.fleet.unloaded(endpoint, name)
            then()

        self._timeline.after(UNLOAD_S, end)
