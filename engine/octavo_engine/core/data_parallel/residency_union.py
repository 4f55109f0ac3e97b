"""The prefixes that any of several cores holds, as one core would report them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from octavo_engine.state.labels import ENTRY_BYTES, NAME_BYTES, ResidencyChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TOKENS = struct.Struct("<I")


class ResidencyUnion:
    """Reports of the cores come in, each with its changes since the last; out comes what changed
    in the whole. Of a name that several hold, the most tokens count."""

    def __init__(self, size: int) -> None:
        self._held: list[dict[bytes, int]] = [{} for _ in range(size)]
        self._awaited: set[int] = set()  # whose snapshots make the next one
        self._owes_snapshot = False

    def watch(self, ranks: Iterable[int]) -> None:
        """These will send a snapshot each; once all have, one of the whole is reported."""
        self._awaited = set(ranks)
        self._owes_snapshot = True

    def clear(self) -> None:
        """Nothing is reported any more."""
        for held in self._held:
            held.clear()
        self._awaited.clear()
        self._owes_snapshot = False

    def apply(self, rank: int, change: ResidencyChange) -> ResidencyChange | None:
        """None where the whole is as before."""
        if change.snapshot is not None:
            self._awaited.discard(rank)
            gone: Iterable[bytes] = self._held[rank]
            entries = _entries(change.snapshot)
        else:
            gone = _names(change.evicted)
            entries = _entries(change.stored)
        return self._update(rank, {**dict.fromkeys(gone, 0), **dict(entries)})

    def lose(self, rank: int) -> ResidencyChange | None:
        """The core is gone, and its cache with it."""
        self._awaited.discard(rank)
        return self._update(rank, dict.fromkeys(self._held[rank], 0))

    def _update(self, rank: int, tokens_of: dict[bytes, int]) -> ResidencyChange | None:
        held = self._held[rank]
        evicted, stored = [], []
        for name, tokens in tokens_of.items():
            before = self._most(name)
            if tokens:
                held[name] = tokens
            else:
                held.pop(name, None)
            now = self._most(name)
            if now and now != before:
                stored.append(name + _TOKENS.pack(now))
            elif before and not now:
                evicted.append(name)
        change = ResidencyChange(stored=b"".join(stored), evicted=b"".join(evicted))
        if self._owes_snapshot and not self._awaited:
            self._owes_snapshot = False
            change.snapshot = self._snapshot()
        return change if stored or evicted or change.snapshot is not None else None

    def _most(self, name: bytes) -> int:
        return max(held.get(name, 0) for held in self._held)

    def _snapshot(self) -> bytes:
        names: set[bytes] = set().union(*self._held)
        return b"".join([name + _TOKENS.pack(self._most(name)) for name in names])


def _entries(packed: bytes) -> Iterator[tuple[bytes, int]]:
    for at in range(0, len(packed), ENTRY_BYTES):
        middle = at + NAME_BYTES
        yield packed[at:middle], _TOKENS.unpack_from(packed, middle)[0]


def _names(packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed), NAME_BYTES):
        yield packed[at : at + NAME_BYTES]
