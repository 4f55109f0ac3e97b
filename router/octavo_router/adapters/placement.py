"""Where adapters go: a pure function from engines and demand to loads and unloads.

In this order, each within the loads that an engine may have under way at once:

    retired      what the pool no longer has is unloaded
    pinned       is loaded on every engine
    waiting      what requests wait for, and no engine has or loads, goes where that costs least
    replicas     what is requested more than its engines' share gets another engine
    idle slots   are filled with what is not loaded anywhere, the most demanded first

An engine costs its queue, and what it has to unload costs the load that it will take again, as far
as it is still requested. Nothing is unloaded to make room while requests use it, nor in its first
`MIN_AGE_S`; a replica replaces only what is worth half of it. So a pool whose slots are too few
waits for the next free one rather than exchange adapters that are in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from octavo_router.adapters.demand import HALF_LIFE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_LOADING = 2  # of one engine at once
MIN_AGE_S = 2.0  # after its load, before an adapter may make room for another
STRANGER_AGE_S = 10.0  # before an adapter unknown to this router is unloaded
SPREAD = 2.0  # an adapter with 1 / SPREAD of an engine's share of requests has one engine to itself
LEAST_RATE = 8 / HALF_LIFE_S  # requests a second, below which a share says little
GROWTH = 0.25  # of an engine, by which demand must exceed an adapter's engines to get another
GAIN = 2.0  # how much more a replica must be worth than what it replaces
BUSY_SHARE = 0.5  # of what would give it another engine, before its queue may do so
CROWDED = 2.0  # loads that a queue must be longer than another engine's to be worth a replica


@dataclass(frozen=True, slots=True)
class AdapterNeed:
    """An adapter of the pool, and who asks for it."""

    name: str
    rate: float = 0.0  # requests a second
    num_waiting: int = 0  # requests that cannot go on without it
    pinned: bool = False
    within: frozenset[frozenset[str]] = frozenset()  # engines of which one must have it; {}: of all


@dataclass(frozen=True, slots=True)
class EngineSlots:
    """An engine that takes requests now."""

    id: str
    capacity: int  # adapters
    wait_s: float = 0.0  # of a short prompt that is sent there
    loaded: Mapping[str, float] = field(default_factory=dict)  # for how many seconds
    loading: frozenset[str] = frozenset()
    unloading: frozenset[str] = frozenset()
    busy: frozenset[str] = frozenset()  # used by requests in flight
    failed: frozenset[str] = frozenset()  # not to be tried there for a while


class AdapterMove(NamedTuple):
    """What one engine is to do: unload, then load. "" for nothing."""

    engine: str
    load: str = ""
    unload: str = ""


def place_adapters(
    engines: Sequence[EngineSlots],
    needs: Sequence[AdapterNeed],
    *,
    load_s: float,
    total_rate: float | None = None,
    retired: frozenset[str] = frozenset(),
) -> list[AdapterMove]:
    """The next moves. `load_s`: how long a load usually takes; `total_rate`: requests a second for
    all adapters of the pool, where `needs` leaves some out that are loaded nowhere; `retired`:
    names that the pool had and has no more."""
    return _Placement(engines, needs, load_s, total_rate, retired).moves()


@dataclass(slots=True)
class _Room:
    """An engine as it will be after the moves so far."""

    engine: EngineSlots
    adapters: set[str]  # loaded and not leaving, or on the way
    num_loading: int

    @property
    def free(self) -> int:
        return self.engine.capacity - len(self.adapters | self.engine.unloading)


class _Placement:
    def __init__(
        self,
        engines: Sequence[EngineSlots],
        needs: Sequence[AdapterNeed],
        load_s: float,
        total_rate: float | None,
        retired: frozenset[str],
    ) -> None:
        self._needs = {need.name: need for need in needs}
        self._by_demand = sorted(needs, key=lambda n: (-n.num_waiting, -n.rate, n.name))
        self._load_s = load_s
        self._retired = retired - self._needs.keys()
        self._moves: list[AdapterMove] = []
        self._rooms = [
            _Room(e, {*e.loaded, *e.loading} - e.unloading, len(e.loading)) for e in engines
        ]
        self._copies: dict[str, int] = {}
        for room in self._rooms:
            for name in room.adapters:
                self._copies[name] = self._copies.get(name, 0) + 1
        self._total = total_rate or sum(need.rate for need in needs)

    def moves(self) -> list[AdapterMove]:
        self._retire()
        for need in self._by_demand:
            if need.pinned:
                for room in self._rooms:
                    self._load(need, room, gain=None)
        for need in self._by_demand:
            for engines in sorted(need.within, key=sorted):
                rooms = [r for r in self._rooms if not engines or r.engine.id in engines]
                if not any(need.name in room.adapters for room in rooms):
                    self._load_cheapest(need, rooms, gain=None)
        for need in self._by_demand:
            if self._copies.get(need.name, 0) < self._wanted(need):
                gain = need.rate / (self._copies[need.name] + 1)
                self._load_cheapest(need, self._rooms, gain=gain)
        self._fill()
        return self._moves

    def _retire(self) -> None:
        for room in self._rooms:
            engine = room.engine
            for name, age_s in engine.loaded.items():
                is_strange = name not in self._needs and age_s >= STRANGER_AGE_S
                if name in engine.unloading or name in engine.busy:
                    continue
                if name in self._retired or is_strange:
                    room.adapters.discard(name)
                    self._moves.append(AdapterMove(engine.id, unload=name))

    def _wanted(self, need: AdapterNeed) -> int:
        """How many engines should have it, by its share of requests and by their queues."""
        copies = self._copies.get(need.name, 0)
        if need.rate < LEAST_RATE or not copies:
            return copies
        share = need.rate / self._total * len(self._rooms) * SPREAD
        if share <= copies * BUSY_SHARE:
            return copies
        waits = [room.engine.wait_s for room in self._rooms if need.name in room.adapters]
        others = [room.engine.wait_s for room in self._rooms if need.name not in room.adapters]
        is_crowded = bool(others) and min(waits) > min(others) + CROWDED * self._load_s
        return copies + (share > copies + GROWTH or is_crowded)

    def _load_cheapest(
        self, need: AdapterNeed, rooms: Sequence[_Room], *, gain: float | None
    ) -> None:
        """`gain`: requests a second that this would serve better; None: they need it."""
        costs = [
            (cost, -room.free, _rendezvous(need.name, room.engine.id), place)
            for place, room in enumerate(rooms)
            if (cost := self._cost(need, room, gain)) is not None
        ]
        if costs:
            self._load(need, rooms[min(costs)[-1]], gain=gain)

    def _cost(self, need: AdapterNeed, room: _Room, gain: float | None) -> float | None:
        """In seconds; None: it cannot be loaded there now."""
        if not self._may_load(need, room):
            return None
        if room.free > 0:
            return room.engine.wait_s
        victim = self._victim(room, gain)
        if victim is None:
            return None
        return room.engine.wait_s + min(1.0, self._worth(victim) * HALF_LIFE_S) * self._load_s

    def _may_load(self, need: AdapterNeed, room: _Room) -> bool:
        engine = room.engine
        return (
            need.name not in room.adapters
            and need.name not in engine.failed
            and need.name not in engine.unloading
            and room.num_loading < MAX_LOADING
        )

    def _load(self, need: AdapterNeed, room: _Room, *, gain: float | None) -> None:
        if not self._may_load(need, room):
            return
        victim = ""
        if room.free <= 0:
            victim = self._victim(room, gain) or ""
            if not victim:
                return
            room.adapters.discard(victim)
            self._copies[victim] -= 1
        room.adapters.add(need.name)
        room.num_loading += 1
        self._copies[need.name] = self._copies.get(need.name, 0) + 1
        self._moves.append(AdapterMove(room.engine.id, load=need.name, unload=victim))

    def _victim(self, room: _Room, gain: float | None) -> str | None:
        """What makes room at the least loss; None: all of it is in use, new, or worth too much."""
        found = min(self._removable(room), default=None)
        if found is None or (gain is not None and found[0] * GAIN > gain):
            return None
        return found[-1]

    def _removable(self, room: _Room) -> Iterator[tuple[float, float, str]]:
        engine = room.engine
        for name, age_s in engine.loaded.items():
            need = self._needs.get(name)
            if name not in room.adapters or name in engine.busy or age_s < MIN_AGE_S:
                continue
            if need is not None and (need.pinned or need.num_waiting):
                continue
            yield self._worth(name), -age_s, name

    def _worth(self, name: str) -> float:
        """Requests a second that would miss it; of several copies the last is worth most."""
        need = self._needs.get(name)
        copies = max(1, self._copies.get(name, 1))
        return need.rate / copies**2 if need is not None else 0.0

    def _fill(self) -> None:
        for need in self._by_demand:
            if self._copies.get(need.name):
                continue
            rooms = [r for r in self._rooms if r.free > 0 and self._may_load(need, r)]
            if not rooms:
                if not any(r.free > 0 and r.num_loading < MAX_LOADING for r in self._rooms):
                    return
                continue
            best = min(rooms, key=lambda r: (-r.free, _rendezvous(need.name, r.engine.id)))
            self._load(need, best, gain=None)


def _rendezvous(name: str, engine: str) -> bytes:
    """An order of engines that differs by adapter and is the same for every router."""
    return blake2b(f"{name}\0{engine}".encode(), digest_size=8).digest()
