"""One pool's waiting line: who goes next when there is room. Pure; knows tenants by name only.

Bands of priority are strict. Within a band tenants take turns by *start-time fair queueing*: each
has a clock of its own that advances by cost / weight when one of its requests goes, and the tenant
whose clock is furthest behind is next. A tenant that was away starts at the time of whoever went
last, so nobody saves up turns. Within a tenant: its own priorities (lower first, as engines have
it), then first come, first served. Cost is in tokens; what a request really used is settled later.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CLOCKS = 1024  # tenants that are remembered while they have nothing waiting


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request in line."""

    tenant: str
    cost: float  # in tokens
    num_bytes: int
    since: float
    deadline: float
    on_turn: Callable[[], bool]  # False: it is gone, the turn is free again
    on_expired: Callable[[], None]
    weight: float = 1.0
    band: int = 0  # lower goes first
    priority: int = 0  # within its tenant; lower goes first
    is_waiting: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class _Line:
    """A tenant's entries in one band."""

    entries: list[tuple[int, int, QueueEntry]] = field(default_factory=list)
    num_waiting: int = 0
    cost: float = 0.0  # of those that wait
    weight: float = 1.0
    has_priorities: bool = False  # not all entries were of priority 0
    is_listed: bool = False


class PoolQueue:
    """Bounded by its owner, which reads the three sizes before it pushes."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_bytes = 0
        self.num_tokens = 0.0
        self._count = 0
        self._lines: dict[tuple[int, str], _Line] = {}
        self._turns: list[tuple[int, float, int, str]] = []  # band, start, order, tenant
        self._clocks: dict[str, float] = {}
        self._now = 0.0  # virtual: the start of the last entry that went

    def __len__(self) -> int:
        return self.num_waiting

    def push(self, entry: QueueEntry) -> None:
        entry.is_waiting = True
        self._count += 1
        self.num_waiting += 1
        self.num_bytes += entry.num_bytes
        self.num_tokens += entry.cost
        line = self._lines.setdefault((entry.band, entry.tenant), _Line())
        line.num_waiting += 1
        line.cost += entry.cost
        line.weight = entry.weight
        line.has_priorities |= entry.priority != 0
        heapq.heappush(line.entries, (entry.priority, self._count, entry))
        self._list(entry.band, entry.tenant, line)

    def pop(self) -> QueueEntry | None:
        """Whose turn it is; the tenant's clock advances by the cost."""
        while self._turns:
            band, start, _, tenant = heapq.heappop(self._turns)
            line = self._lines[band, tenant]
            line.is_listed = False
            entry = _first(line)
            if entry is None:
                del self._lines[band, tenant]
                continue
            # The clock may have moved since: what it used was settled, or it went in another band.
            clock = self._clocks.get(tenant, 0.0)
            if clock > start:
                self._list(band, tenant, line)
                continue
            heapq.heappop(line.entries)
            self._now = max(self._now, start)
            self._clocks[tenant] = start + entry.cost / entry.weight
            self._leave(line, entry)
            if line.num_waiting:
                self._list(band, tenant, line)
            else:
                del self._lines[band, tenant]
            self._forget_clocks()
            return entry
        return None

    def discard(self, entry: QueueEntry) -> None:
        """It waits no longer; nothing if it did not."""
        if entry.is_waiting:
            line = self._lines[entry.band, entry.tenant]
            self._leave(line, entry)
            if len(line.entries) > 32 and line.num_waiting * 2 < len(line.entries):
                line.entries = [item for item in line.entries if item[2].is_waiting]
                heapq.heapify(line.entries)

    def expired(self, now: float) -> list[QueueEntry]:
        """Remove and return those whose deadline has passed."""
        late = [
            entry
            for line in self._lines.values()
            for _, _, entry in line.entries
            if entry.is_waiting and entry.deadline <= now
        ]
        for entry in late:
            self.discard(entry)
        return late

    def settle(self, tenant: str, cost: float, weight: float) -> None:
        """It used so much more (less, if negative) than its entry's cost."""
        clock = self._clocks.get(tenant)
        if clock is not None:
            self._clocks[tenant] = max(0.0, clock + cost / weight)

    def cost_ahead(
        self, tenant: str, cost: float, *, weight: float, band: int, priority: int
    ) -> float:
        """About what would go before such an entry if it came now: all of higher bands, what its
        tenant has waiting, and of each other tenant as much as it may have in the meantime."""
        own = self._lines.get((band, tenant))
        ahead = 0.0
        if own is not None and (own.has_priorities or priority):
            ahead = sum(e.cost for p, _, e in own.entries if e.is_waiting and p <= priority)
        elif own is not None:
            ahead = own.cost
        turn = ahead + cost
        for (other_band, name), line in self._lines.items():
            if other_band < band:
                ahead += line.cost
            elif other_band == band and name != tenant:
                ahead += min(line.cost, turn * line.weight / weight)
        return ahead

    def ahead_of(self, entry: QueueEntry) -> int:
        """About how many will go first: those that came first, in its band and above."""
        return sum(
            other.is_waiting and other.band <= entry.band and other.since < entry.since
            for line in self._lines.values()
            for _, _, other in line.entries
        )

    def _list(self, band: int, tenant: str, line: _Line) -> None:
        if not line.is_listed:
            line.is_listed = True
            self._count += 1
            start = max(self._now, self._clocks.get(tenant, 0.0))
            heapq.heappush(self._turns, (band, start, self._count, tenant))

    def _leave(self, line: _Line, entry: QueueEntry) -> None:
        entry.is_waiting = False
        line.num_waiting -= 1
        line.cost -= entry.cost
        self.num_waiting -= 1
        self.num_bytes -= entry.num_bytes
        self.num_tokens -= entry.cost

    def _forget_clocks(self) -> None:
        if len(self._clocks) <= MAX_CLOCKS:
            return
        waiting = {tenant for _, tenant in self._lines}
        for tenant, clock in list(self._clocks.items()):
            if clock <= self._now and tenant not in waiting:
                del self._clocks[tenant]


def _first(line: _Line) -> QueueEntry | None:
    """The entry whose turn it would be; those that left are dropped on the way."""
    while line.entries and not line.entries[0][2].is_waiting:
        heapq.heappop(line.entries)
    return line.entries[0][2] if line.entries else None
