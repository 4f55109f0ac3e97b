"""The prefixes that any of several cores holds, as one core would report them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.protocol.kv_events import TIER_MEDIA
from octavo_engine.state.labels import ENTRY_BYTES, NAME_BYTES, ResidencyChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_TOKENS = struct.Struct("<I")


class _Hit(NamedTuple):
    """Of two, the larger one counts: what lies in quicker memory, then what has more tokens."""

    speed: int  # 0: in the KV cache; below: in a tier, -1 - its index in TIER_MEDIA
    tokens: int


_NOTHING = _Hit(-1 - len(TIER_MEDIA), 0)


class ResidencyUnion:
    """Reports of the cores come in, each with its changes since the last; out comes what changed
    in the whole. Of a name that several hold, the one in the quickest memory counts, then the one
    with the most tokens."""

    def __init__(self, size: int) -> None:
        self._held: list[dict[bytes, _Hit]] = [{} for _ in range(size)]
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
            hits = _hits(change.snapshot, change.snapshot_tiers)
        else:
            gone = _names(change.evicted)
            hits = _hits(change.stored, change.tiers)
        return self._update(rank, {**dict.fromkeys(gone, _NOTHING), **hits})

    def lose(self, rank: int) -> ResidencyChange | None:
        """The core is gone, and its cache with it."""
        self._awaited.discard(rank)
        return self._update(rank, dict.fromkeys(self._held[rank], _NOTHING))

    def _update(self, rank: int, hits: dict[bytes, _Hit]) -> ResidencyChange | None:
        held = self._held[rank]
        evicted: list[bytes] = []
        changed: dict[bytes, _Hit] = {}
        for name, hit in hits.items():
            before = self._best(name)
            if hit == _NOTHING:
                held.pop(name, None)
            else:
                held[name] = hit
            now = self._best(name)
            if now == before:
                continue
            if now.speed < 0:  # it is no longer where it was
                evicted.append(name)
            if now != _NOTHING:
                changed[name] = now
        stored, tiers = _packed(changed)
        change = ResidencyChange(stored=stored, evicted=b"".join(evicted), tiers=tiers)
        if self._owes_snapshot and not self._awaited:
            self._owes_snapshot = False
            names: set[bytes] = set().union(*self._held)
            change.snapshot, change.snapshot_tiers = _packed({n: self._best(n) for n in names})
        return change if changed or evicted or change.snapshot is not None else None

    def _best(self, name: bytes) -> _Hit:
        return max(held.get(name, _NOTHING) for held in self._held)


def _hits(packed: bytes, tiers: Mapping[str, bytes]) -> dict[bytes, _Hit]:
    """By name. An entry of a tier comes after those of the KV cache, and counts."""
    hits = {name: _Hit(0, tokens) for name, tokens in _entries(packed)}
    for medium, entries in tiers.items():
        speed = -1 - TIER_MEDIA.index(medium)
        hits.update((name, _Hit(speed, tokens)) for name, tokens in _entries(entries))
    return hits


def _packed(hits: Mapping[bytes, _Hit]) -> tuple[bytes, dict[str, bytes]]:
    """What the KV cache holds, and what tiers hold by medium."""
    found: dict[int, list[bytes]] = {}
    for name, hit in hits.items():
        found.setdefault(hit.speed, []).append(name + _TOKENS.pack(hit.tokens))
    stored = b"".join(found.pop(0, ()))
    return stored, {TIER_MEDIA[-1 - speed]: b"".join(those) for speed, those in found.items()}


def _entries(packed: bytes) -> Iterator[tuple[bytes, int]]:
    for at in range(0, len(packed), ENTRY_BYTES):
        middle = at + NAME_BYTES
        yield packed[at:middle], _TOKENS.unpack_from(packed, middle)[0]


def _names(packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed), NAME_BYTES):
        yield packed[at : at + NAME_BYTES]
