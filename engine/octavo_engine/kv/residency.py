"""Which labels the prefix cache makes true: labels hang on blocks, and come and go with them.

A label says that a prompt with some prefix finds so many tokens cached. It hangs on the last full
block that this takes. It is true while that block can be found, which takes all blocks before it
too: one that was evicted before those that follow it *hides* them until it is computed again.

A name may hang on several blocks of one chain, with more tokens on each: the last one that is there
counts, and when that goes, the one before it counts again.

With tiers, a block that leaves the pool and lies in one of them keeps its labels. They are reported
with the tier's medium, until no tier has the block either or it is back in the pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.outside_blocks import IN_POOL, OutsideBlock, OutsideBlocks
from octavo_engine.protocol.kv_events import TIER_MEDIA
from octavo_engine.state.labels import ENTRY_BYTES, NAME_BYTES, ResidencyChange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.kv.outside_blocks import TierPlaces
    from octavo_engine.kv.prefix_cache import PrefixCache
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.sequence import Sequence

MAX_LABELS = 32  # on one block; the oldest goes for a new one
MAX_ENDED = 1024  # sequences whose answer can still be labelled
ANSWER_LEAD = 8  # blocks of the prompt's end that an answer's labels may hang on
MAX_SNAPSHOT = 4_000_000  # entries; a message must not be longer than the wire allows

_TOKENS_BYTES = ENTRY_BYTES - NAME_BYTES
_ENTRY = np.dtype([("name", "<u8"), ("tokens", "<u4")])


class LabelEnd(NamedTuple):
    """What is left of a sequence: the names of its last blocks."""

    first: int
    digests: list[bytes]


class ResidencyLabels:
    """A CacheListener. Nothing is collected while it is not watched; labels are kept all the
    same."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._labels: dict[bytes, bytes] = {}  # by block: entries, end to end
        self._hidden: set[bytes] = set()  # blocks that are cached and cannot be reached
        # A name for less than a block hangs on first blocks that may differ: how many hold it.
        self._first: set[bytes] = set()
        self._short: dict[bytes, int] = {}
        self._ended: OrderedDict[str, LabelEnd] = OrderedDict()
        # By name: its tokens, and its place where that is a tier; nothing if it is gone.
        self._changes: dict[bytes, bytes] | None = None
        self._tiers: TierPlaces | None = None
        self._outside = OutsideBlocks()
        self._owes_snapshot = False

    def __len__(self) -> int:
        """Blocks with labels."""
        return len(self._labels)

    def use_tiers(self, tiers: TierPlaces) -> None:
        """Keep the labels of blocks that leave the pool for as long as one of these holds them."""
        self._tiers = tiers

    # ── called by the cache ──

    def stored(self, sequence: Sequence, index: int) -> None:
        digests = sequence.digests
        digest = digests[index]
        was_outside = self._outside.discard(digest)
        if was_outside is not None and was_outside.is_first:
            self._remember_short(digest)
        if index:
            parent = digests[index - 1]
            is_held = self._cache.get(parent) is not None or parent in self._outside
            if parent in self._hidden or not is_held:
                self._hidden.add(digest)
                return
        if was_outside is not None:
            self._hidden.discard(digest)
            self._show(digest)
        if self._hidden:
            self._reveal(digest)

    def removed(self, digest: bytes, parent: bytes) -> None:
        is_first = digest in self._first
        if is_first:
            self._first.discard(digest)
            self._forget_short(self._labels.get(digest, b""))
        if self._tiers is not None and self._labels and (place := self._tiers.place_of(digest)):
            dropped = self._outside.add(digest, OutsideBlock(parent, place, is_first))
            if digest not in self._hidden:
                self._show(digest)
            if dropped is not None:
                self._leave_tiers(dropped)
            return
        self._forget(digest, parent)

    def cleared(self) -> None:
        """Those outside are forgotten too: what is cleared is to begin anew."""
        self._short.clear()
        self._outside.clear()
        for entries in self._labels.values():
            self._withdraw(entries, b"")
        self._labels.clear()
        self._hidden.clear()
        self._first.clear()

    def reached(self, sequence: Sequence, start: int, end: int) -> None:
        """Blocks [start, end) of a sequence with labels are cached, found or computed."""
        labels = sequence.request.labels
        if labels is not None:
            self._attach(labels, sequence.digests, 0, start, end)

    def ended(self, sequence: Sequence) -> None:
        """Its blocks are about to be given back; labels for its answer may come still."""
        if sequence.request.labels is None:
            return
        first = max(0, sequence.num_prompt_tokens // BLOCK_SIZE - ANSWER_LEAD)
        digests = sequence.digests[first : sequence.num_published_blocks]
        self._ended[sequence.request_id] = LabelEnd(first, digests)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    # ── called by the engine ──

    def label(self, request_id: str, labels: Labels) -> None:
        """Labels for the answer of a sequence that ended; once, and only if that is not long
        ago."""
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            first, digests = ended
            self._attach(labels, digests, first, first, first + len(digests), check=True)

    def watch(self, *, on: bool) -> None:
        """From now on changes are collected, and the next one carries a snapshot."""
        if not on:
            self._changes, self._owes_snapshot = None, False
            return
        self._changes = self._changes or {}
        self._owes_snapshot = True

    def take(self) -> ResidencyChange | None:
        """What changed since the last call; None if nothing did."""
        if self._tiers is not None:
            self._follow_tiers(self._tiers)
        changes = self._changes
        if not changes and not self._owes_snapshot:
            return None
        assert changes is not None  # watch() sets both
        change = ResidencyChange()
        if changes:
            in_pool = NAME_BYTES + _TOKENS_BYTES
            entries = [name + tokens for name, tokens in changes.items()]
            change.evicted = b"".join([e[:NAME_BYTES] for e in entries if len(e) != in_pool])
            change.stored = b"".join([e for e in entries if len(e) == in_pool])
            change.tiers = _by_medium([e for e in entries if len(e) > in_pool])
            self._changes = {}
        if self._owes_snapshot:
            change.snapshot = self.snapshot()
            change.snapshot_tiers = self.snapshot_tiers(change.snapshot)
            self._owes_snapshot = False
        return change

    def snapshot(self) -> bytes:
        """Every entry of the pool that is true now, those of one name in the order of their
        tokens."""
        if self._hidden or len(self._outside):
            shown = (
                entries
                for digest, entries in self._labels.items()
                if digest not in self._hidden and digest not in self._outside
            )
            packed = b"".join(shown)
        else:
            packed = b"".join(self._labels.values())
        entries = np.frombuffer(packed, _ENTRY)
        order = np.argsort(entries["tokens"], kind="stable")[:MAX_SNAPSHOT]
        return entries[order].tobytes()

    def snapshot_tiers(self, in_pool: bytes) -> dict[str, bytes]:
        """The same of the blocks outside, by medium; of a name the one with the most tokens.
        `in_pool` is the snapshot of the pool, whose names are left out."""
        if not len(self._outside):
            return {}
        pooled: set[int] = set(np.frombuffer(in_pool, _ENTRY)["name"].tolist())
        found: dict[bytes, bytes] = {}
        for digest in self._outside:
            for name, change in self._shown(digest) if digest not in self._hidden else ():
                is_pooled = int.from_bytes(name, "little") in pooled
                if len(change) > _TOKENS_BYTES and not is_pooled:
                    found[name] = max(found.get(name, change), change, key=_change_tokens)
        return _by_medium([name + change for name, change in found.items()][:MAX_SNAPSHOT])

    # ── labels on blocks ──

    def _attach(
        self, labels: Labels, digests: list[bytes], first: int, start: int, end: int, *,
        check: bool = False,
    ) -> None:  # fmt: skip
        """Those on blocks [start, end); `digests` begins with block `first`."""
        blocks = memoryview(labels.blocks).cast("I")
        stop = bisect_left(blocks, end)
        begin = bisect_left(blocks, start, 0, stop)
        found: list[tuple[bytes, bytes]] = []
        # Backwards: what is known already was put there with all that comes before it.
        for place in range(stop - 1, begin - 1, -1):
            digest = digests[blocks[place] - first]
            if check and self._cache.get(digest) is None:
                continue
            entry = labels.entries[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]
            if self._labels.get(digest) == entry and not check:
                break
            found.append((digest, entry))
            if blocks[place] == 0:
                self._first.add(digest)
        for digest, entry in reversed(found):  # of a name's entries the last one counts
            self._put(digest, entry)

    def _put(self, digest: bytes, entry: bytes) -> None:
        known = self._labels.get(digest, b"")
        name = entry[:NAME_BYTES]
        for at in range(0, len(known), ENTRY_BYTES):
            if known.startswith(name, at):
                if _tokens(known, at) >= _tokens(entry, 0):
                    return
                known = known[:at] + known[at + ENTRY_BYTES :]
                break
        else:
            if len(known) == MAX_LABELS * ENTRY_BYTES:
                oldest, known = known[:ENTRY_BYTES], known[ENTRY_BYTES:]
                if digest in self._first:
                    self._forget_short(oldest)
                self._withdraw(oldest, b"")
            if digest in self._first:
                self._short[name] = self._short.get(name, 0) + 1
        self._labels[digest] = known + entry
        if self._changes is not None and digest not in self._hidden:
            self._changes[name] = entry[NAME_BYTES:]

    def _withdraw(self, entries: bytes, before: bytes, place: int = IN_POOL) -> None:
        """They are not true any more; `before` are the entries of the block before, and `place` is
        its own."""
        changes = self._changes
        if changes is None:
            return
        for at in range(0, len(entries), ENTRY_BYTES):
            name = entries[at : at + NAME_BYTES]
            tokens = _find(before, name) if before else b""
            if tokens or name not in self._short:
                changes[name] = tokens + _packed_place(place) if tokens else b""

    def _forget(self, digest: bytes, parent: bytes) -> None:
        """The block is nowhere any more."""
        entries = self._labels.pop(digest, None)
        if digest in self._hidden:
            self._hidden.discard(digest)
        elif entries is not None:
            before = self._outside.get(parent)
            place = IN_POOL if before is None else before.place
            self._withdraw(entries, self._labels.get(parent, b""), place)
        if self._cache.children(digest) or self._outside.children(digest):
            self._hide(digest)

    def _show(self, digest: bytes) -> None:
        """Its entries are true, at the place where it is now."""
        if self._changes is not None:
            self._changes.update(self._shown(digest))

    def _shown(self, digest: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The name and the change of each of its entries. Outside, what the pool has for a name
        counts, then what a block behind this one has."""
        entries = self._labels.get(digest, b"")
        outside = self._outside.get(digest)
        place = IN_POOL if outside is None else outside.place
        before = b""
        if outside is not None and outside.parent not in self._outside:
            before = self._labels.get(outside.parent, b"")
        behind = self._behind(digest) if outside is not None and entries else {}
        for at in range(0, len(entries), ENTRY_BYTES):
            middle = at + NAME_BYTES
            name = entries[at:middle]
            if tokens := _find(before, name):
                yield name, tokens
            elif name in behind:
                yield name, behind[name]
            elif not place or name not in self._short:
                yield name, entries[middle : at + ENTRY_BYTES] + _packed_place(place)

    def _behind(self, digest: bytes) -> dict[bytes, bytes]:
        """By name, the changes of blocks outside that follow this one."""
        found: dict[bytes, bytes] = {}
        for child in self._outside.children(digest):
            block, entries = self._outside.get(child), self._labels.get(child, b"")
            place = b"" if block is None else _packed_place(block.place)
            for at in range(0, len(entries), ENTRY_BYTES):
                middle = at + NAME_BYTES
                found[entries[at:middle]] = entries[middle : at + ENTRY_BYTES] + place
        return found

    def _remember_short(self, digest: bytes) -> None:
        self._first.add(digest)
        entries = self._labels.get(digest, b"")
        for at in range(0, len(entries), ENTRY_BYTES):
            name = entries[at : at + NAME_BYTES]
            self._short[name] = self._short.get(name, 0) + 1

    def _forget_short(self, entries: bytes) -> None:
        for at in range(0, len(entries), ENTRY_BYTES):
            name = entries[at : at + NAME_BYTES]
            self._short[name] -= 1
            if not self._short[name]:
                del self._short[name]

    # ── blocks outside ──

    def _follow_tiers(self, tiers: TierPlaces) -> None:
        for digest in tiers.take_changed():
            block = self._outside.get(digest)
            if block is None:
                continue
            place = tiers.place_of(digest)
            if not place:
                self._leave_tiers(digest)
            elif place != block.place:
                self._outside.move(digest, place)
                if digest not in self._hidden:
                    self._show(digest)

    def _leave_tiers(self, digest: bytes) -> None:
        block = self._outside.discard(digest)
        if block is not None:
            self._forget(digest, block.parent)

    # ── blocks that cannot be reached ──

    def _hide(self, digest: bytes) -> None:
        for child in self._descend(digest):
            if child in self._hidden:
                continue
            self._hidden.add(child)
            entries = self._labels.get(child)
            if entries is not None:
                self._withdraw(entries, b"")

    def _reveal(self, digest: bytes) -> None:
        self._hidden.discard(digest)
        for child in self._descend(digest):
            self._hidden.discard(child)
            self._show(child)

    def _descend(self, digest: bytes) -> Iterator[bytes]:
        """All blocks that follow in the pool and outside, parents before their children."""
        wanted = [digest]
        while wanted:
            parent = wanted.pop()
            for child in (*self._cache.children(parent), *self._outside.children(parent)):
                yield child
                wanted.append(child)


def _packed_place(place: int) -> bytes:
    """Behind the tokens of a change; nothing for the pool."""
    return bytes((place,)) if place else b""


def _by_medium(entries: list[bytes]) -> dict[str, bytes]:
    """Entries whose last byte is the place, without it."""
    found: dict[str, list[bytes]] = {}
    for entry in entries:
        found.setdefault(TIER_MEDIA[entry[-1] - 1], []).append(entry[:-1])
    return {medium: b"".join(those) for medium, those in found.items()}


def _change_tokens(change: bytes) -> int:
    return int.from_bytes(change[:_TOKENS_BYTES], "little")


def _tokens(entries: bytes, at: int) -> int:
    return int.from_bytes(entries[at + NAME_BYTES : at + ENTRY_BYTES], "little")


def _find(entries: bytes, name: bytes) -> bytes:
    """The tokens beside a name; empty if it is not there."""
    for at in range(0, len(entries), ENTRY_BYTES):
        if entries.startswith(name, at):
            return entries[at + NAME_BYTES : at + ENTRY_BYTES]
    return b""
