"""The KV memory of sequences: what they find cached, what they hold, what they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.pool import BlockPool
from octavo_engine.kv.prefix_cache import CachedPrefix
from octavo_engine.kv.residency import ResidencyLabels
from octavo_engine.protocol.prefix_hash import (
    block_digest,
    chain_digests,
    pack_tokens,
    root_digest,
)
from octavo_engine.state.batch import BlockCopy

if TYPE_CHECKING:
    from octavo_engine.kv.block import Block
    from octavo_engine.kv.listener import CacheListener
    from octavo_engine.state.sequence import Sequence


class PrefixMatch(NamedTuple):
    """How a waiting sequence could start."""

    prefix: CachedPrefix
    num_blocks: (
        int  # that would leave the free queue: fresh ones, hits on free ones, the copy's source
    )
    awaits: bytes | None  # the digest it needs next, if another sequence is computing just that

    @property
    def num_tokens(self) -> int:
        return self.prefix.num_tokens


class KVManager:
    """Blocks by sequence. A sequence is admitted with blocks for all tokens it has, then grows by
    one at a time; so only sequences that decode can ever run out of memory.

    A block is published once its tokens are computed, never before. What is being computed is known
    too: a sequence that needs exactly that waits for it instead of computing it again.
    """

    def __init__(self, num_blocks: int, *, cache_key: bytes = b"", caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.residency = ResidencyLabels(self.pool.cache)
        self.computing: dict[bytes, Sequence] = {}  # digest of a block to come -> its sequence
        self.pinned: list[Block] = []  # sources of this step's copies: they must survive until then
        self._cache_key = cache_key
        self._named: tuple[list[int], bytes, list[bytes]] | None = None  # a prompt, root, digests
        self._caching = caching
        self.listen(self.residency)

    def listen(self, listener: CacheListener) -> None:
        """Have it hear of every full block that comes into the cache or leaves it."""
        self.pool.cache.listeners.append(listener)

    def name_blocks(self, sequence: Sequence) -> None:
        """Compute the digests of all its tokens' blocks; before it waits, first or again."""
        if not self._caching:
            return
        request = sequence.request
        # All that a block's content depends on beside its tokens and those before it.
        adapter = "" if request.adapter is None else request.adapter.digest
        sequence.root = root_digest(self._cache_key, salt=request.cache_salt, adapter=adapter)
        if not sequence.digests and self._named is not None:
            prompt, root, digests = self._named
            # The answers to one prompt share it, and come one after the other.
            if prompt is request.prompt_token_ids and root == sequence.root:
                sequence.digests = digests[:]
        known = len(sequence.digests)
        parent = sequence.digests[-1] if known else sequence.root
        tokens = sequence.token_ids
        sequence.digests += chain_digests(
            parent, tokens[known * BLOCK_SIZE :], block_size=BLOCK_SIZE
        )
        num_prompt_blocks = sequence.num_prompt_tokens // BLOCK_SIZE
        digests = sequence.digests[:num_prompt_blocks]
        self._named = (request.prompt_token_ids, sequence.root, digests)
        tail = tokens[len(sequence.digests) * BLOCK_SIZE :]
        parent = sequence.digests[-1] if sequence.digests else sequence.root
        sequence.tail_digest = block_digest(parent, pack_tokens(tail)) if tail else None

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What it would find cached now, what that would cost, and whether it had better wait."""
        pool = self.pool
        total = -(-len(sequence.token_ids) // BLOCK_SIZE)
        limit = len(sequence.token_ids) - 1  # the last token is computed: its logits are needed
        if sequence.wants_prompt_scores:
            limit = min(limit, sequence.num_scored_tokens)  # so are those of all after it
        unread = sequence.request.params.skip_reading_prefix_cache
        if not self._caching or unread or limit == 0:
            return PrefixMatch(CachedPrefix([], None, 0), total, None)
        prefix = pool.cache.match(sequence.root, sequence.digests, sequence.token_ids, limit)
        num_blocks = total - len(prefix.blocks)
        num_blocks += sum(block.ref_count == 0 for block in prefix.blocks)
        if prefix.source is not None and prefix.source.ref_count == 0:
            if num_blocks < pool.num_free:
                num_blocks += 1
            else:  # no room to hold the source through the copy: compute those tokens
                prefix = CachedPrefix(prefix.blocks, None, 0)
        awaits = None
        if prefix.num_tokens < limit and not sequence.wants_prompt_scores:
            following = sequence.digests[len(prefix.blocks) :]
            needed = following[0] if following else sequence.tail_digest
            awaits = needed if needed in self.computing else None
        return PrefixMatch(prefix, num_blocks, awaits)

    def admit(self, sequence: Sequence, match: PrefixMatch) -> BlockCopy | None:
        """Give it the blocks of `match` and fresh ones for the rest of its tokens."""
        pool = self.pool
        prefix = match.prefix
        num_tokens = len(sequence.token_ids)
        pool.touch(prefix.blocks)
        if prefix.source is not None:
            pool.touch((prefix.source,))
            self.pinned.append(prefix.source)
        fresh = pool.allocate(-(-num_tokens // BLOCK_SIZE) - len(prefix.blocks))
        sequence.block_table = [block.id for block in (*prefix.blocks, *fresh)]
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_published_blocks = len(prefix.blocks)
        sequence.num_admitted_tokens = num_tokens
        for digest in self._uncomputed(sequence):
            self.computing.setdefault(digest, sequence)
        self.residency.reached(sequence, 0, len(prefix.blocks))
        if prefix.source is None:
            return None
        return BlockCopy(prefix.source.id, fresh[0].id, prefix.num_copied)

    def grow(self, sequence: Sequence) -> int | None:
        """One more block for its next token; None if none is free."""
        if self.pool.num_free == 0:
            return None
        block_id = self.pool.allocate(1)[0].id
        sequence.block_table.append(block_id)
        return block_id

    def publish(self, sequence: Sequence) -> None:
        """Let others find its computed blocks; the partly filled last one too, once it caught
        up."""
        if not self._caching:
            return
        digests = sequence.digests
        num_full = sequence.num_computed_tokens // BLOCK_SIZE
        for index in range(sequence.num_published_blocks, num_full):
            tokens = self._tokens(sequence, index)
            parent = digests[index - 1] if index else sequence.root
            if index == len(digests):
                digests.append(block_digest(parent, tokens))
            block = self.pool.blocks[sequence.block_table[index]]
            if self.pool.cache.publish(block, parent, tokens, digests[index]):
                for listener in self.pool.cache.listeners:
                    listener.stored(sequence, index)
            self._computed(digests[index], sequence)
        self.residency.reached(sequence, sequence.num_published_blocks, num_full)
        sequence.num_published_blocks = num_full
        if sequence.num_computed_tokens == sequence.num_admitted_tokens:
            self._publish_tail(sequence)
            self._computed(sequence.tail_digest, sequence)

    def release(self, sequence: Sequence) -> None:
        """Take its blocks back. What it computed stays cached until the memory is needed."""
        if self._caching and sequence.block_table:
            self._publish_tail(sequence)
            self.residency.ended(sequence)
        self._free(sequence)

    def release_spoiled(self, sequence: Sequence) -> None:
        """Take its blocks back and forget what they hold: its numbers went wrong somewhere, perhaps
        in an earlier chunk, perhaps in blocks that it found; no other sequence may find them."""
        for block_id in sequence.block_table:
            block = self.pool.blocks[block_id]
            if block.parent is not None:
                self.pool.cache.retract(block)
        self._free(sequence)

    def end_step(self) -> None:
        """The step's copies are done: their sources may go."""
        if self.pinned:
            self.pool.free(self.pinned)
            self.pinned = []

    def clear_cache(self) -> None:
        """Forget all cached blocks. Only while no sequence holds any."""
        assert all(block.ref_count == 0 for block in self.pool.blocks)
        self.pool.cache.clear()

    def _free(self, sequence: Sequence) -> None:
        for digest in self._uncomputed(sequence):
            self._computed(digest, sequence)
        self.pool.free(self.pool.blocks[block_id] for block_id in reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    def _publish_tail(self, sequence: Sequence) -> None:
        index, num_filled = divmod(sequence.num_computed_tokens, BLOCK_SIZE)
        if num_filled == 0:
            return
        # NOTE: a copy that is planned and not made yet is never published here: its source, pinned
        # till then, holds the same tokens, and the cache keeps only what adds something.
        parent = sequence.digests[index - 1] if index else sequence.root
        tokens = self._tokens(sequence, index)[: num_filled * 4]
        block = self.pool.blocks[sequence.block_table[index]]
        self.pool.cache.publish(block, parent, tokens, None)

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        return pack_tokens(sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])

    def _uncomputed(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks it has yet to compute."""
        digests = sequence.digests[sequence.num_published_blocks :]
        if sequence.tail_digest is not None:
            digests.append(sequence.tail_digest)
        return digests

    def _computed(self, digest: bytes | None, sequence: Sequence) -> None:
        if digest is not None and self.computing.get(digest) is sequence:
            del self.computing[digest]
