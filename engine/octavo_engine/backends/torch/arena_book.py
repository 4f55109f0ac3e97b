"""Which adapter lies in which arena of the device's memory, and which arena each slot means. Pure.

There are a few more arenas than slots. So an adapter that a request will want can be sent before a
slot is free for it, and one that left its slot is still there if it comes back soon.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable


class ArenaPlacement(NamedTuple):
    """What became of a slot."""

    arena: int
    must_fill: bool  # the adapter is not there
    released: int = -1  # the arena that no slot means any more; steps under way may still read it


class ArenaBook:
    """Adapters are compared by `==`."""

    def __init__(self, num_slots: int, num_arenas: int) -> None:
        assert num_arenas > num_slots
        self.of_slots = np.full(num_slots, -1, np.int32)  # -1: the slot is empty
        self._held: dict[int, Hashable] = {}
        self._arenas: dict[Hashable, int] = {}
        self._users: Counter[int] = Counter()  # slots
        # That no slot means, the one to be given away first in front.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_arenas))
        self._expected: set[int] = set()  # idle ones whose adapter is wanted soon

    def expect(self, adapter: Hashable) -> int | None:
        """The arena to send an adapter to that is wanted soon; None: it is there, or there is no
        arena but those that others wait for."""
        arena = self._arenas.get(adapter)
        if arena is None:
            arena = next((a for a in self._idle if a not in self._expected), None)
            if arena is None:
                return None
            self._put(arena, adapter)
            self._idle.move_to_end(arena)
            self._expected.add(arena)
            return arena
        if arena in self._idle:
            self._idle.move_to_end(arena)
            self._expected.add(arena)
        return None

    def place(self, slot: int, adapter: Hashable) -> ArenaPlacement:
        """The slot means this adapter from now on."""
        released = self.empty(slot)
        arena = self._arenas.get(adapter)
        must_fill = arena is None
        if arena is None:
            arena = next((a for a in self._idle if a not in self._expected), None)
            if arena is None:
                arena = next(iter(self._idle))
            self._put(arena, adapter)
        self._idle.pop(arena, None)
        self._expected.discard(arena)
        self._users[arena] += 1
        self.of_slots[slot] = arena
        return ArenaPlacement(arena, must_fill, released)

    def empty(self, slot: int) -> int:
        """The slot means nothing; returns the arena that no slot means any more, or -1."""
        arena = int(self.of_slots[slot])
        if arena < 0:
            return -1
        self.of_slots[slot] = -1
        self._users[arena] -= 1
        if self._users[arena]:
            return -1
        del self._users[arena]
        self._idle[arena] = None
        return arena

    def lose(self, arena: int) -> None:
        """What was to be there is not: slots that mean it are empty."""
        self.of_slots[self.of_slots == arena] = -1
        if self._users.pop(arena, 0):
            self._idle[arena] = None
        self._forget(arena)

    def _forget(self, arena: int) -> None:
        adapter = self._held.pop(arena, None)
        if adapter is not None:
            del self._arenas[adapter]
        self._expected.discard(arena)

    def forget_idle(self) -> None:
        for arena in self._idle:
            self._forget(arena)

    @property
    def placed(self) -> dict[int, Hashable]:
        """Adapters of the arenas that slots mean."""
        return {arena: self._held[arena] for arena in self._users if arena in self._held}

    def _put(self, arena: int, adapter: Hashable) -> None:
        self._forget(arena)
        self._held[arena] = adapter
        self._arenas[adapter] = arena
