"""Which blocks hold which tokens: by chained digest if full, and by what follows a prefix."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.media_names import num_agreeing, parts_of
from octavo_engine.protocol.prefix_hash import TOKEN_BYTES, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.listener import CacheListener
    from octavo_engine.kv.media_names import MediaPart
    from octavo_engine.state.media import MediaSpan


class CachedPrefix(NamedTuple):
    """Full blocks that can be shared, from place `first` on, and a block whose first `num_copied`
    tokens come next."""

    blocks: list[Block]
    source: Block | None
    num_copied: int
    first: int = 0

    @property
    def num_full(self) -> int:
        """Places before those that are still to be computed."""
        return self.first + len(self.blocks)

    @property
    def num_tokens(self) -> int:
        return self.num_full * BLOCK_SIZE + self.num_copied


class PrefixCache:
    """The index of published blocks of one group of layers. It holds no references: who owns or
    evicts a block calls it.

    Blocks with the same parent are *siblings*, kept sorted by their packed tokens. The sibling with
    the longest common prefix to any run of tokens is then beside the place where that run
    would be inserted: an exact answer by bisection, however many prompts begin alike.
    """

    def __init__(self) -> None:
        self._full: dict[bytes, Block] = {}
        self._siblings: dict[bytes, list[tuple[bytes, int, Block]]] = {}
        self.listeners: list[CacheListener] = []  # the cache's owner calls `stored`

    def __len__(self) -> int:
        return sum(map(len, self._siblings.values()))

    def get(self, digest: bytes) -> Block | None:
        return self._full.get(digest)

    def children(self, digest: bytes) -> list[bytes]:
        """The full blocks that follow one."""
        siblings = self._siblings.get(digest, ())
        return [block.digest for _, _, block in siblings if block.digest is not None]

    def publish(
        self,
        block: Block,
        parent: bytes,
        tokens: bytes,
        digest: bytes | None,
        media: tuple[MediaPart, ...] = (),
    ) -> bool:
        """Offer a block whose tokens are computed; `digest` if it is full. False if it adds nothing
        new.

        A block published before with fewer tokens is published anew.
        """
        if block.parent is not None:
            self.retract(block)
        if digest is not None:
            if digest in self._full:
                return False
            self._full[digest] = block
        elif self._is_covered(parent, tokens):
            return False
        block.parent, block.tokens, block.digest = parent, tokens, digest
        block.media = media
        insort(self._siblings.setdefault(parent, []), (tokens, block.id, block))
        return True

    def retract(self, block: Block) -> None:
        """Forget what a block holds. Blocks that follow it stay, unreachable until it is computed
        again."""
        assert block.parent is not None, "the block is not published"
        siblings = self._siblings[block.parent]
        del siblings[bisect_left(siblings, (block.tokens, block.id))]
        if not siblings:
            del self._siblings[block.parent]
        digest, parent = block.digest, block.parent
        block.parent, block.tokens, block.digest = None, b"", None
        if digest is not None:
            del self._full[digest]
            for listener in self.listeners:
                listener.removed(digest, parent)

    def clear(self) -> None:
        """Forget what all blocks hold."""
        for siblings in self._siblings.values():
            for _, _, block in siblings:
                block.parent, block.tokens, block.digest = None, b"", None
        self._siblings.clear()
        self._full.clear()
        for listener in self.listeners:
            listener.cleared()

    def match(
        self,
        root: bytes,
        digests: Sequence[bytes],
        token_ids: Sequence[int],
        limit: int,
        media: Sequence[MediaSpan] = (),
    ) -> CachedPrefix:
        """What is cached of the first `limit` tokens."""
        blocks: list[Block] = []
        parent = root
        for digest in digests[: limit // BLOCK_SIZE]:
            block = self._full.get(digest)
            if block is None:
                break
            blocks.append(block)
            parent = digest
        start = len(blocks) * BLOCK_SIZE
        following = token_ids[start : min(start + BLOCK_SIZE, limit)]
        parts = parts_of(media, len(blocks)) if media else ()
        source, num_copied = self.longest(parent, following, parts)
        return CachedPrefix(blocks, source, num_copied)

    def longest(
        self, parent: bytes, token_ids: Sequence[int], media: tuple[MediaPart, ...] = ()
    ) -> tuple[Block | None, int]:
        """The block behind `parent` that begins like `token_ids` for longest, and for how long."""
        siblings = self._siblings.get(parent)
        if siblings is None or not token_ids:
            return None, 0
        wanted = pack_tokens(token_ids)
        place = bisect_left(siblings, (wanted,))
        best: Block | None = None
        best_length = 0
        for tokens, _, block in siblings[max(place - 1, 0) : place + 1]:
            length = num_agreeing(block.media, media, _common_tokens(tokens, wanted))
            if length > best_length:
                best, best_length = block, length
        return best, best_length

    def _is_covered(self, parent: bytes, tokens: bytes) -> bool:
        siblings = self._siblings.get(parent)
        if siblings is None:
            return False
        place = bisect_left(siblings, (tokens,))
        return place < len(siblings) and siblings[place][0].startswith(tokens)


def _common_tokens(left: bytes, right: bytes) -> int:
    end = min(len(left), len(right))
    for start in range(0, end, TOKEN_BYTES):
        if left[start : start + TOKEN_BYTES] != right[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return end // TOKEN_BYTES
