"""Bringing KV blocks back into the pool from outside: which ones help a sequence, and where they
go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.group_match import common_end
from octavo_engine.kv.media_names import packed_block, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as List

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.manager import KVManager
    from octavo_engine.kv.prefix_cache import PrefixCache
    from octavo_engine.state.sequence import Sequence


class BlockTurn(NamedTuple):
    """A block of a sequence: its place in the block table of a group of layers."""

    group: int
    place: int
    digest: bytes


class _Anywhere(NamedTuple):
    """What one group finds in the pool or outside."""

    cache: PrefixCache
    group: int
    is_outside: Callable[[bytes, int], bool]

    def get(self, digest: bytes) -> object | None:
        found = self.cache.get(digest)
        return found if found is not None else self.is_outside(digest, self.group) or None


def wanted_blocks(
    kv: KVManager, sequence: Sequence, is_outside: Callable[[bytes, int], bool]
) -> tuple[int, list[BlockTurn]]:
    """How many blocks of a prefix could be had with those outside, and which of them the pool
    lacks."""
    limit = (len(sequence.token_ids) - 1) // BLOCK_SIZE
    digests = sequence.digests[:limit]
    groups = kv.needs.groups
    views = [_Anywhere(cache, g, is_outside) for g, cache in enumerate(kv.pool.caches)]
    end = common_end(views, groups, digests)
    wanted = [
        BlockTurn(group, place, digests[place])
        for group, needs in enumerate(groups)
        for place in range(needs.first(end * BLOCK_SIZE), end)
        if kv.pool.caches[group].get(digests[place]) is None
    ]
    return end, wanted


def place_blocks(
    kv: KVManager, sequence: Sequence, turns: List[BlockTurn]
) -> list[tuple[BlockTurn, Block]]:
    """Publish blocks for a sequence that waits, as if they had been computed: it finds them when
    it is admitted, as all others do. The caller writes their content at once.

    No more than fit beside what others were promised; with windows all of them or none.
    """
    caches, pool = kv.pool.caches, kv.pool
    turns = [turn for turn in turns if caches[turn.group].get(turn.digest) is None]
    end = max((turn.place for turn in turns), default=-1) + 1
    held = [
        block
        for group, needs in enumerate(kv.needs.groups)
        for digest in sequence.digests[needs.first(end * BLOCK_SIZE) : end]
        if (block := caches[group].get(digest)) is not None
    ]
    pool.touch(held)  # what stands before them must not be what is overwritten
    room = max(kv.num_available, 0)
    if len(turns) > room:
        turns = [] if kv.has_windows else sorted(turns, key=lambda turn: turn.place)[:room]
    placed = []
    for turn in sorted(turns):
        block = pool.allocate(1, turn.group)[0]
        tokens = packed_block(sequence, turn.place)
        media = parts_of(sequence.request.media, turn.place)
        parent = sequence.digests[turn.place - 1] if turn.place else sequence.root
        cache = caches[turn.group]
        cache.publish(block, parent, tokens, turn.digest, media)
        for listener in cache.listeners:
            listener.stored(sequence, turn.place)
        placed.append((turn, block))
    pool.free([*(block for _, block in reversed(placed)), *reversed(held)])
    return placed
