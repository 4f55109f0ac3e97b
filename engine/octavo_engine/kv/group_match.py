"""The longest prefix that is cached in all groups of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.media_names import parts_of
from octavo_engine.kv.prefix_cache import CachedPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.needs import GroupNeeds
    from octavo_engine.kv.prefix_cache import PrefixCache
    from octavo_engine.kv.states import StateSnapshots
    from octavo_engine.state.media import MediaSpan


def match_groups(
    caches: Sequence[PrefixCache],
    needs: Sequence[GroupNeeds],
    root: bytes,
    digests: Sequence[bytes],
    token_ids: Sequence[int],
    limit: int,
    media: Sequence[MediaSpan] = (),
    states: StateSnapshots | None = None,
) -> list[CachedPrefix]:
    """Of the first `limit` tokens; of each group the blocks that what comes next would see, all of
    equally many tokens. With `states` it ends at a snapshot, so no part of a block is copied."""
    if states is not None:
        end = end_at_snapshot(caches, needs, digests[: limit // BLOCK_SIZE], states.longest)
        firsts = [need.first(end * BLOCK_SIZE) for need in needs]
        return [
            CachedPrefix(_blocks(cache, digests[first:end]), None, 0, first)
            for cache, first in zip(caches, firsts, strict=True)
        ]
    if len(caches) == 1 and needs[0].behind is None:
        return [caches[0].match(root, digests, token_ids, limit, media)]
    end = common_end(caches, needs, digests[: limit // BLOCK_SIZE])
    parent = digests[end - 1] if end else root
    following = token_ids[end * BLOCK_SIZE : min((end + 1) * BLOCK_SIZE, limit)]
    parts = parts_of(media, end) if media else ()
    sources = [cache.longest(parent, following, parts) for cache in caches]
    num_copied = min(count for _, count in sources)
    matches = []
    for cache, need, (source, _) in zip(caches, needs, sources, strict=True):
        first = need.first(end * BLOCK_SIZE)
        blocks = _blocks(cache, digests[first:end])
        matches.append(CachedPrefix(blocks, source if num_copied else None, num_copied, first))
    return matches


def _blocks(cache: PrefixCache, digests: Sequence[bytes]) -> list[Block]:
    found = [cache.get(digest) for digest in digests]
    blocks = [block for block in found if block is not None]
    assert len(blocks) == len(digests), "the end was chosen so that all are there"
    return blocks


class FindsBlocks(Protocol):
    """A PrefixCache, or one together with what can be brought into it."""

    def get(self, digest: bytes) -> object | None: ...


def end_at_snapshot(
    caches: Sequence[FindsBlocks],
    needs: Sequence[GroupNeeds],
    digests: Sequence[bytes],
    longest: Callable[[Sequence[bytes], int], int],
) -> int:
    """The largest number of full blocks that all groups serve and behind which there is a snapshot,
    of which `longest` knows as `StateSnapshots` does."""
    end = len(digests)
    while True:
        end = longest(digests, common_end(caches, needs, digests[:end]))
        if common_end(caches, needs, digests[:end]) == end:
            return end


def common_end(
    caches: Sequence[FindsBlocks], needs: Sequence[GroupNeeds], digests: Sequence[bytes]
) -> int:
    """The largest number of full blocks such that each group has all that are seen from there."""
    end = len(digests)
    for cache, need in zip(caches, needs, strict=True):
        if need.behind is None:
            missing = (i for i in range(end) if cache.get(digests[i]) is None)
            end = next(missing, end)
    windowed = [pair for pair in zip(caches, needs, strict=True) if pair[1].behind is not None]
    is_settled = False
    while not is_settled:
        before = end
        for cache, need in windowed:
            end = _end_in_window(cache, need, digests, end)
        is_settled = end == before
    return end


def _end_in_window(cache: FindsBlocks, need: GroupNeeds, digests: Sequence[bytes], end: int) -> int:
    """The largest end up to `end` before which the whole window is there."""
    place = end
    while place > need.first(end * BLOCK_SIZE):
        place -= 1
        if cache.get(digests[place]) is None:
            end = place  # every end behind it that sees it is out
    return end
