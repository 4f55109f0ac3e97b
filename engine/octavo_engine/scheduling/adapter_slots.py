"""Which adapter lies in which slot of the backend: the one that no sequence used for longest goes
first. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from octavo_engine.state.adapter import AdapterPlacement

if TYPE_CHECKING:
    from octavo_engine.state.adapter import HeldAdapter
    from octavo_engine.state.sequence import Sequence


class AdapterSlots:
    """As many adapters can take part in a step as there are slots.

    A slot that a running sequence uses keeps its adapter. An idle one keeps it too, until another
    adapter needs the place.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.running: Counter[str] = Counter()  # sequences by the adapter's name
        self._placed: list[AdapterPlacement] = []  # not taken yet
        self._users: Counter[int] = Counter()  # running sequences by slot
        self._slots: dict[str, int] = {}  # by the adapter's digest
        self._digests: dict[int, str] = {}
        # Slots without users, the one to be given away first in front.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))

    def has_room(self, adapter: HeldAdapter) -> bool:
        return bool(self._idle) or adapter.digest in self._slots

    def acquire(self, sequence: Sequence) -> None:
        """Give a slot to a sequence that begins to run. Only where there is room."""
        adapter, ref = sequence.adapter, sequence.request.adapter
        assert adapter is not None and ref is not None
        slot = self._slots.get(adapter.digest)
        if slot is None:
            slot = next(iter(self._idle))
            self._slots.pop(self._digests.pop(slot, ""), None)
            self._slots[adapter.digest] = slot
            self._digests[slot] = adapter.digest
            self._placed.append(AdapterPlacement(slot, adapter))
        self._idle.pop(slot, None)
        self._users[slot] += 1
        self.running[ref.name] += 1
        sequence.adapter_slot = slot

    def take_placed(self) -> list[AdapterPlacement]:
        """What must be put into slots before the next step; each is handed out once."""
        placed, self._placed = self._placed, []
        return placed

    def place_again(self, placed: list[AdapterPlacement]) -> None:
        """What was taken for a step that failed, before or after it was put there."""
        self._placed += [p for p in placed if self._digests.get(p.slot) == p.adapter.digest]

    def release(self, sequence: Sequence) -> None:
        """The sequence no longer runs."""
        slot, ref = sequence.adapter_slot, sequence.request.adapter
        assert slot >= 0 and ref is not None
        sequence.adapter_slot = -1
        self.running[ref.name] -= 1
        if not self.running[ref.name]:
            del self.running[ref.name]
        self._users[slot] -= 1
        if not self._users[slot]:
            del self._users[slot]
            self._idle[slot] = None

    def check(self, running: list[Sequence]) -> None:
        """Raises AssertionError if the account does not agree with the sequences that run."""
        users = Counter(s.adapter_slot for s in running if s.adapter_slot >= 0)
        assert users == self._users, "slots are not counted right"
        assert set(self._idle).isdisjoint(users), "a slot in use is idle"
        assert len(self._idle) + len(users) == self.num_slots, "a slot is lost"
        for sequence in running:
            assert (sequence.adapter is None) == (sequence.adapter_slot < 0)
            if sequence.adapter is not None:
                assert self._digests[sequence.adapter_slot] == sequence.adapter.digest
