"""Bringing KV blocks back into the pool from outside: which ones help a sequence, and where they
go."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.caches import STATE_GROUP
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.group_match import common_end, end_at_snapshot
from octavo_engine.kv.media_names import packed_block, parts_of
from octavo_engine.protocol.prefix_hash import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as List

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.manager import KVManager
    from octavo_engine.kv.prefix_cache import PrefixCache
    from octavo_engine.state.sequence import Sequence


class BlockTurn(NamedTuple):
    """A block of a sequence: its place in the block table of a group of layers. Or the recurrent
    states behind the block there."""

    group: int  # STATE_GROUP for states
    place: int
    digest: bytes  # of a tail: that of the block before it
    tail: bytes = b""  # its packed tokens, if it is partly filled


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
    """How many blocks of a prefix could be had with those outside, and what of them the pool lacks;
    behind its blocks the states, where the model has some."""
    limit = (len(sequence.token_ids) - 1) // BLOCK_SIZE
    digests = sequence.digests[:limit]
    groups, states = kv.needs.groups, kv.states
    views = [_Anywhere(cache, g, is_outside) for g, cache in enumerate(kv.pool.caches)]
    if states is None:
        end = common_end(views, groups, digests)
    else:
        longest = partial(states.longest, is_outside=lambda digest: is_outside(digest, STATE_GROUP))
        end = end_at_snapshot(views, groups, digests, longest)
    wanted = [
        BlockTurn(group, place, digests[place])
        for group, needs in enumerate(groups)
        for place in range(needs.first(end * BLOCK_SIZE), end)
        if kv.pool.caches[group].get(digests[place]) is None
    ]
    if states is not None and end and digests[end - 1] not in states.cached:
        wanted.append(BlockTurn(STATE_GROUP, end - 1, digests[end - 1]))
    return end, wanted


def wanted_tail(kv: KVManager, sequence: Sequence) -> list[BlockTurn]:
    """The tokens behind its last full block but the last one, which is always computed: in each
    group that lacks them. None with recurrent states, which are not known there."""
    if kv.states is not None:
        return []
    limit = len(sequence.token_ids) - 1
    place, count = divmod(limit, BLOCK_SIZE)
    if not count or parts_of(sequence.request.media, place):
        return []
    parent = sequence.digests[place - 1] if place else sequence.root
    tail = packed_block(sequence, place)[: count * TOKEN_BYTES]
    tokens = sequence.token_ids[place * BLOCK_SIZE : limit]
    return [
        BlockTurn(group, place, parent, tail)
        for group, cache in enumerate(kv.pool.caches)
        if cache.longest(parent, tokens)[1] < count
    ]


def place_blocks(
    kv: KVManager, sequence: Sequence, turns: List[BlockTurn]
) -> list[tuple[BlockTurn, Block]]:
    """Publish blocks for a sequence that waits, as if they had been computed: it finds them when
    it is admitted, as all others do. The caller writes their content at once.

    No more than fit beside what others were promised; with windows or states all of them or none.
    States are not among them (`StateSnapshots.place`).
    """
    caches, pool = kv.pool.caches, kv.pool
    turns = [t for t in turns if t.tail or caches[t.group].get(t.digest) is None]
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
        turns = [] if kv.needs_whole_prefixes else sorted(turns, key=lambda t: t.place)[:room]
    placed = []
    for turn in sorted(turns):
        block = pool.allocate(1, turn.group)[0]
        cache = caches[turn.group]
        if turn.tail:
            if not cache.publish(block, turn.digest, turn.tail, None):
                pool.free([block])  # the pool has had it since
                continue
        else:
            tokens = packed_block(sequence, turn.place)
            media = parts_of(sequence.request.media, turn.place)
            parent = sequence.digests[turn.place - 1] if turn.place else sequence.root
            cache.publish(block, parent, tokens, turn.digest, media)
            for listener in cache.listeners:
                listener.stored(sequence, turn.place)
        placed.append((turn, block))
    pool.free([*(block for _, block in reversed(placed)), *reversed(held)])
    return placed
