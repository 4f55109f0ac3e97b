"""Blocks that are retained: they are not evicted before their time is over.

A request says how long its blocks are to be found after its end. While they are free and retained,
no other sequence gets their memory, with one exception: a sequence that runs alone and needs more
than is left. So retained blocks never stop the engine, and a limit holds what they take, in all and
for each tenant.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as List

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.pool import BlockPool
    from octavo_engine.state.retention import KVRetention
    from octavo_engine.state.sequence import Sequence

SPARE_ENTRIES = 64  # outdated ones in a heap, beyond as many as there are retained blocks


class RetentionLimits(NamedTuple):
    """In blocks."""

    in_all: int
    per_owner: int
    ttl_s: float  # longer ones are cut


class RetainedBlock:
    """One of them, and until when."""

    __slots__ = ("block", "is_shared", "owner", "place", "priority", "session", "stamp", "until")

    def __init__(self, block: Block, place: int, ask: KVRetention) -> None:
        self.block = block
        self.place = place  # in its prompt: of equals the end is given up first
        self.owner, self.session, self.priority = ask.owner, ask.session, ask.priority
        self.is_shared = False  # more than one session retains it: none of them gives it up
        self.until = 0.0
        self.stamp = -1  # of its valid entry in each heap


_Entry = tuple[float, float, int, int, RetainedBlock]  # by what it is ordered, stamp, block


class RetainedBlocks:
    """A CacheListener that says which of the pool's blocks are retained."""

    def __init__(self, pool: BlockPool, limits: RetentionLimits) -> None:
        self._pool, self._limits = pool, limits
        self._retained: dict[bytes, RetainedBlock] = {}  # by digest
        self._num_owned: dict[str, int] = {}
        self._sessions: dict[tuple[str, str], set[bytes]] = {}
        self._by_end: list[_Entry] = []
        self._by_worth: dict[str, list[_Entry]] = {}  # by owner
        self._num_stamps = 0
        self.num_refused = 0  # blocks beyond a limit
        self.num_given_up = 0  # blocks, before their time was over
        pool.cache.listeners.append(self)

    def __len__(self) -> int:
        return len(self._retained)

    def of_owner(self, owner: str) -> int:
        """How many blocks a tenant has retained."""
        return self._num_owned.get(owner, 0)

    def retain(self, digests: List[bytes], ask: KVRetention, now: float) -> None:
        """Blocks of a prefix, as far as limits allow. Those retained already stay so for longer."""
        if ask.ttl_s <= 0:
            self._end_session(ask.owner, ask.session)
            return
        until = now + min(ask.ttl_s, self._limits.ttl_s)
        for place, digest in enumerate(digests):
            block = self._pool.cache.get(digest)
            if block is None:
                return  # none of those that follow can be found without it
            entry = self._retained.get(digest)
            if entry is None:
                if not self._has_room(ask):
                    self.num_refused += len(digests) - place
                    return
                entry = self._retained[digest] = RetainedBlock(block, place, ask)
                self._num_owned[ask.owner] = self.of_owner(ask.owner) + 1
                if ask.session:
                    self._sessions.setdefault((ask.owner, ask.session), set()).add(digest)
                self._pool.retain(block)
            elif (entry.owner, entry.session) != (ask.owner, ask.session):
                entry.is_shared = True
            entry.until = max(entry.until, until)
            entry.priority = max(entry.priority, ask.priority)
            self._push(entry)

    def expire(self, now: float) -> None:
        """End what is over."""
        while self._by_end and self._by_end[0][0] <= now:
            *_, stamp, entry = heappop(self._by_end)
            if entry.stamp == stamp:
                self._drop(entry)

    def give_up(self, count: int) -> int:
        """End the retention of so many free blocks, of the least worth first. Returns of how
        many."""
        held: list[_Entry] = []
        given = 0
        while given < count and (item := self._least(self._by_worth)) is not None:
            entry = item[-1]
            if entry.block.ref_count:  # that would free nothing
                held.append(heappop(self._by_worth[entry.owner]))
                continue
            self._drop(entry)
            given += 1
        for item in held:
            heappush(self._by_worth[item[-1].owner], item)
        self.num_given_up += given
        return given

    # -- called by the cache ---------------------------------------------------------------------

    def stored(self, sequence: Sequence, index: int) -> None:
        """Blocks are retained when their sequence ends."""

    def removed(self, digest: bytes, parent: bytes) -> None:
        entry = self._retained.get(digest)
        if entry is not None:
            self._drop(entry, digest)

    def cleared(self) -> None:
        for digest, entry in list(self._retained.items()):
            self._drop(entry, digest)

    # --------------------------------------------------------------------------------------------

    def _has_room(self, ask: KVRetention) -> bool:
        """Under both limits; at one of them also if a block of lower priority makes room."""
        if self.of_owner(ask.owner) >= self._limits.per_owner:
            item = self._least((ask.owner,))
        elif len(self) >= self._limits.in_all:
            item = self._least(self._by_worth)
        else:
            return True
        if item is None or item[0] >= ask.priority:
            return False
        self._drop(item[-1])
        self.num_given_up += 1
        return True

    def _least(self, owners: Iterable[str]) -> _Entry | None:
        """Of what these owners retain, the block of the least worth."""
        heads = []
        for heap in (self._by_worth[owner] for owner in owners if owner in self._by_worth):
            while heap and heap[0][-1].stamp != heap[0][-2]:
                heappop(heap)
            if heap:
                heads.append(heap[0])
        return min(heads, default=None)

    def _end_session(self, owner: str, session: str) -> None:
        for digest in sorted(
            self._sessions.get((owner, session), ()), key=lambda name: -self._retained[name].place
        ):
            entry = self._retained[digest]
            if not entry.is_shared:
                self._drop(entry, digest)

    def _push(self, entry: RetainedBlock) -> None:
        self._num_stamps += 1
        entry.stamp = self._num_stamps
        if len(self._by_end) > 2 * len(self) + SPARE_ENTRIES:
            self._by_end = [item for item in self._by_end if item[-1].stamp == item[-2]]
            heapify(self._by_end)
        heappush(self._by_end, _by_end(entry))
        heap = self._by_worth.setdefault(entry.owner, [])
        if len(heap) > 2 * self.of_owner(entry.owner) + SPARE_ENTRIES:
            heap[:] = [item for item in heap if item[-1].stamp == item[-2]]
            heapify(heap)
        heappush(heap, _by_worth(entry))

    def _drop(self, entry: RetainedBlock, digest: bytes | None = None) -> None:
        """`digest`: of a block that has lost its name."""
        name = digest if digest is not None else entry.block.digest
        assert name is not None, "a block without its name is not retained"
        del self._retained[name]
        entry.stamp = -1
        self._num_owned[entry.owner] -= 1
        if not self._num_owned[entry.owner]:
            del self._num_owned[entry.owner]
            self._by_worth.pop(entry.owner, None)  # outdated entries only
        key = (entry.owner, entry.session)
        if (of_session := self._sessions.get(key)) is not None:
            of_session.discard(name)
            if not of_session:
                del self._sessions[key]
        self._pool.end_retention(entry.block)


def _by_end(entry: RetainedBlock) -> _Entry:
    return entry.until, 0.0, -entry.place, entry.stamp, entry


def _by_worth(entry: RetainedBlock) -> _Entry:
    return float(entry.priority), entry.until, -entry.place, entry.stamp, entry
