"""The residency index in plain Python: the slow twin of csrc/router/residency.cpp."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.protocol.route_keys import KEY_BYTES, unpack_keys
from octavo_engine.protocol.stream import STORED_BYTES
from octavo_router.residency.api import MAX_ASSUMED_KEYS_PER_SLOT, MAX_KEYS_PER_SLOT

if TYPE_CHECKING:
    from collections.abc import Sequence

_STORED = struct.Struct("<QI")
MAX_TOKENS = 2**22 - 2  # what a native entry can hold; more is stored as this
MAX_LIMIT = 2**28
MAX_SEARCHES = 3  # before the whole chain is read
_BYTES_PER_KEY = 150  # a dict's entry with its two ints, roughly


@dataclass(slots=True)
class _Slot:
    """What was stored or assumed lately, and what was assumed before that.

    Assumed keys are kept in two generations: when `young` holds half of the limit, `old` is
    forgotten and `young` becomes it. What is used again moves to `young`, whole prefixes at a time.
    """

    young: dict[int, int] = field(default_factory=dict)
    old: dict[int, int] = field(default_factory=dict)

    def find(self, key: int) -> int | None:
        tokens = self.young.get(key)
        return self.old.get(key) if tokens is None else tokens


class PyResidencyIndex:
    """See residency.api.ResidencyIndex."""

    def __init__(
        self,
        *,
        max_keys_per_slot: int = MAX_KEYS_PER_SLOT,
        max_assumed_keys_per_slot: int = MAX_ASSUMED_KEYS_PER_SLOT,
    ) -> None:
        check_limits(max_keys_per_slot, max_assumed_keys_per_slot)
        self._max_keys = max_keys_per_slot
        self._max_young = max_assumed_keys_per_slot // 2
        self._slots: list[_Slot | None] = []
        self.num_refused = 0

    def add_slot(self) -> int:
        for number, slot in enumerate(self._slots):
            if slot is None:
                self._slots[number] = _Slot()
                return number
        self._slots.append(_Slot())
        return len(self._slots) - 1

    def drop_slot(self, slot: int, /) -> None:
        self._slot(slot)
        self._slots[slot] = None

    def apply(self, slot: int, stored: bytes, evicted: bytes, /) -> None:
        _check_whole(stored, STORED_BYTES, "stored")
        _check_whole(evicted, KEY_BYTES, "evicted")
        held = self._slot(slot)
        for key in unpack_keys(evicted):
            held.young.pop(key, None)
            held.old.pop(key, None)
        for key, tokens in _STORED.iter_unpack(stored):
            held.old.pop(key, None)
            if key not in held.young and len(held.young) + len(held.old) >= self._max_keys:
                self.num_refused += 1
                continue
            held.young[key] = min(tokens, MAX_TOKENS)

    def clear(self, slot: int, /) -> None:
        self._slot(slot)
        self._slots[slot] = _Slot()

    def assume(self, slot: int, keys: bytes, tokens_per_key: float, /) -> None:
        _check_whole(keys, KEY_BYTES, "keys")
        if not 0.0 <= tokens_per_key <= MAX_TOKENS:
            raise ValueError(f"tokens_per_key must be from 0 to {MAX_TOKENS}")
        held = self._slot(slot)
        chain = unpack_keys(keys)[: self._max_young]
        num_new = sum(key not in held.young for key in chain)
        if len(held.young) + num_new > self._max_young:
            held.old, held.young = held.young, {}
        for index, key in enumerate(chain):
            held.old.pop(key, None)
            held.young[key] = min(int((index + 1) * tokens_per_key), MAX_TOKENS)

    def match(self, keys: bytes, slots: Sequence[int], /) -> list[int]:
        _check_whole(keys, KEY_BYTES, "keys")
        chain = unpack_keys(keys)
        return [_longest(self._slot(slot), chain) for slot in slots]

    def num_keys(self, slot: int, /) -> int:
        held = self._slot(slot)
        return len(held.young) + len(held.old)

    @property
    def memory_bytes(self) -> int:
        held = [slot for slot in self._slots if slot is not None]
        return _BYTES_PER_KEY * sum(len(slot.young) + len(slot.old) for slot in held)

    def _slot(self, number: int) -> _Slot:
        if 0 <= number < len(self._slots) and (slot := self._slots[number]) is not None:
            return slot
        raise IndexError(f"slot {number} is not in use")


def _longest(slot: _Slot, chain: Sequence[int]) -> int:
    """The tokens of the deepest key held, where keys held are a prefix of the chain but for gaps.

    A search by halves: log2 of the chain's length. The first key is taken for held until nothing
    deeper was found, for it may stand for too few tokens to be stored. Where the search ends, the
    key before must be held too; if not, one of the two is a gap or a collision, and the search goes
    on before it.
    """
    if not chain:
        return 0
    limit = len(chain)
    for _ in range(MAX_SEARCHES):
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            if slot.find(chain[middle - 1]) is None:
                high = middle - 1
            else:
                low = middle
        if low <= 2 or slot.find(chain[low - 2]) is not None:
            return slot.find(chain[low - 1]) or 0
        limit = low - 2
    low = 1
    while low < limit and slot.find(chain[low]) is not None:
        low += 1
    return slot.find(chain[low - 1]) or 0


def check_limits(max_keys: int, max_assumed_keys: int) -> None:
    for name, limit in (("max_keys", max_keys), ("max_assumed_keys", max_assumed_keys)):
        if not 2 <= limit <= MAX_LIMIT:
            raise ValueError(f"{name}_per_slot must be from 2 to {MAX_LIMIT}; got {limit}")


def _check_whole(packed: bytes, width: int, name: str) -> None:
    if len(packed) % width:
        raise ValueError(f"{name} has {len(packed)} bytes, which are not whole entries of {width}")
