"""The KV memory of sequences: what they find cached, what they hold, what they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.caches import STATE_GROUP
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.kv.group_match import match_groups
from octavo_engine.kv.media_names import (
    extras_of,
    name_full_blocks,
    named_tokens,
    packed_block,
    parts_of,
)
from octavo_engine.kv.needs import KVNeeds
from octavo_engine.kv.pool import BlockPool
from octavo_engine.kv.prefix_cache import CachedPrefix
from octavo_engine.kv.residency import ResidencyLabels
from octavo_engine.kv.retention import RetainedBlocks
from octavo_engine.protocol.prefix_hash import (
    TOKEN_BYTES,
    block_digest,
    chain_digests,
    pack_tokens,
    root_digest,
)
from octavo_engine.state.batch import BlockCopy, BlockGrowth

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as List

    from octavo_engine.kv.block import Block
    from octavo_engine.kv.listener import CacheListener
    from octavo_engine.kv.retention import RetentionLimits
    from octavo_engine.kv.states import StateSnapshots
    from octavo_engine.state.sequence import Sequence


GIVEN_BACK = -1  # in a block table: the block left the window


class BlockSave(NamedTuple):
    """A full block that was just computed, or recurrent states behind one: what a tier may hold
    beside the pool."""

    block_id: int  # of states: the slot
    group: int  # STATE_GROUP for states
    digest: bytes
    num_tokens: int = 0  # of states: those that they stand for


class PrefixMatch(NamedTuple):
    """How a waiting sequence could start."""

    prefixes: list[CachedPrefix]  # in each group of layers, all of equally many tokens
    # That would leave the free queue, or be promised: fresh ones, hits on free ones, the copies'
    # sources.
    num_blocks: int
    awaits: bytes | None  # the digest it needs next, if another sequence is computing just that

    @property
    def prefix(self) -> CachedPrefix:
        """In the first group."""
        return self.prefixes[0]

    @property
    def num_tokens(self) -> int:
        return self.prefixes[0].num_tokens


class KVManager:
    """Blocks by sequence. A sequence is admitted with blocks for all tokens it has, then grows by
    one at a time; so only sequences that decode can ever run out of memory.

    Layers whose window is narrow are the exception, and keep to the same rule: there a sequence is
    admitted with the most blocks that it holds at a time. What leaves the window is given back, and
    as many blocks are *promised* to it until its prompt is computed. `windows` are those of the
    groups of layers, and `max_step_tokens` is what one sequence computes between two reports.

    A block is published once its tokens are computed, never before. What is being computed is known
    too: a sequence that needs exactly that waits for it instead of computing it again.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        windows: List[int | None] = (None,),
        max_step_tokens: int = 1,
        cache_key: bytes = b"",
        caching: bool = True,
        states: StateSnapshots | None = None,
        retention: RetentionLimits | None = None,
    ) -> None:
        """`retention`: how many blocks may be retained. Of no effect with windows or states, which
        do not stay beside the blocks that are retained."""
        self.pool = BlockPool(num_blocks, len(windows))
        self.needs = KVNeeds(windows, max_step_tokens)
        self.num_groups = len(windows)
        self.has_windows = bool(self.needs.windowed)
        # Free blocks that are spoken for: promised ones, and one for each further holder of a block
        # in a window. Whoever shares it may be left alone with it.
        self._num_promised = 0
        self.retained: RetainedBlocks | None = None
        can_retain = caching and not self.has_windows and states is None
        if retention is not None and retention.in_all and can_retain:
            self.retained = RetainedBlocks(self.pool, retention)
        self.residency = ResidencyLabels(self.pool.cache)
        self.computing: dict[bytes, Sequence] = {}  # digest of a block to come -> its sequence
        self.pinned: list[Block] = []  # sources of this step's copies: they must survive until then
        # Where tiers hold blocks beside the pool: what was computed and what proved wrong later,
        # since they last looked.
        self.saves: list[BlockSave] | None = None
        self.spoiled: list[bytes] = []
        self._cache_key = cache_key
        self._named: tuple[list[int], bytes, list[bytes]] | None = None  # a prompt, root, digests
        self._caching = caching
        self.states = states  # of models with recurrent states
        self.listen(self.residency)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken without breaking a promise, cached ones among them and retained
        ones not."""
        return self.pool.num_allocatable - self._num_promised

    @property
    def needs_whole_prefixes(self) -> bool:
        """Whether the first blocks of a prefix are of no use without those that follow."""
        return self.has_windows or self.states is not None

    def listen(self, listener: CacheListener) -> None:
        """Have it hear of every full block that comes into the first group's cache or leaves it."""
        self.pool.cache.listeners.append(listener)

    def name_blocks(self, sequence: Sequence) -> None:
        """Compute the digests of all its tokens' blocks; before it waits, first or again."""
        if not self._caching:
            return
        request = sequence.request
        # All that a block's content depends on beside its tokens and those before it.
        adapter = "" if request.adapter is None else request.adapter.digest
        salt = request.cache_salt
        if request.audio is not None:  # all tokens attend to it; of a fixed length, so unambiguous
            salt += request.audio.digest.hex()
        sequence.root = root_digest(self._cache_key, salt=salt, adapter=adapter)
        if not sequence.digests and self._named is not None and not request.media:
            prompt, root, digests = self._named
            # The answers to one prompt share it, and come one after the other.
            if prompt is request.prompt_token_ids and root == sequence.root:
                sequence.digests = digests[:]
        if request.media:
            self._name_with_media(sequence)
            return
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

    def _name_with_media(self, sequence: Sequence) -> None:
        sequence.digests = digests = name_full_blocks(sequence, sequence.digests)
        index = len(digests)
        tail = self._tokens(sequence, index)
        parent = digests[-1] if digests else sequence.root
        extras = extras_of(parts_of(sequence.request.media, index))
        sequence.tail_digest = block_digest(parent, tail, extras=extras) if tail else None

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What it would find cached now, what that would cost, and whether it had better wait."""
        total = -(-len(sequence.token_ids) // BLOCK_SIZE)
        limit = len(sequence.token_ids) - 1  # the last token is computed: its logits are needed
        if sequence.wants_prompt_scores:
            limit = min(limit, sequence.num_scored_tokens)  # so are those of all after it
        unread = sequence.request.params.skip_reading_prefix_cache
        if not self._caching or unread or limit == 0:
            nothing = [CachedPrefix([], None, 0)] * self.num_groups
            return PrefixMatch(nothing, self._cost(nothing, total), None)
        prefixes = match_groups(
            self.pool.caches,
            self.needs.groups,
            sequence.root,
            sequence.digests,
            named_tokens(sequence),
            limit,
            sequence.request.media,
            self.states,
        )
        num_blocks = self._cost(prefixes, total)
        if prefixes[0].source is not None:
            num_sources = self._source_cost(prefixes)
            if num_sources and num_blocks + num_sources > self.num_available:
                # No room to hold the sources through the copy: compute those tokens.
                prefixes = [p._replace(source=None, num_copied=0) for p in prefixes]
            else:
                num_blocks += num_sources
        awaits = None
        if prefixes[0].num_tokens < limit and not sequence.wants_prompt_scores:
            awaits = self._awaited(sequence, prefixes[0].num_full, limit)
        return PrefixMatch(prefixes, num_blocks, awaits)

    def _awaited(self, sequence: Sequence, num_full: int, limit: int) -> bytes | None:
        """What it could go on with next, if another sequence is computing just that."""
        if self.states is None:
            following = sequence.digests[num_full:]
            needed = following[0] if following else sequence.tail_digest
            return needed if needed in self.computing else None
        if not self.states.num_snapshots:
            return None
        for end in self.states.likely_ends(limit // BLOCK_SIZE):
            owner = self.computing.get(sequence.digests[end - 1]) if end > num_full else None
            if owner is not None and self.states.is_to_come(owner, end):
                return sequence.digests[end - 1]
        return None

    def admit(self, sequence: Sequence, match: PrefixMatch) -> list[BlockCopy]:
        """Give it the blocks of `match` and fresh ones for the rest of its tokens, as far as its
        windows let it hold them at a time."""
        num_tokens = len(sequence.token_ids)
        total = -(-num_tokens // BLOCK_SIZE)
        tables, copies = [], []
        # All hits are held before any block is taken: none of them may be what is taken.
        for group, prefix in enumerate(match.prefixes):
            self._touch(group, prefix.blocks)
            if prefix.source is not None:
                self._touch(group, (prefix.source,))
                self.pinned.append(prefix.source)
        for group, prefix in enumerate(match.prefixes):
            num_held = self.needs.groups[group].blocks(total - prefix.first)
            num_fresh = num_held - len(prefix.blocks)
            self.reclaim(num_fresh)
            fresh = self.pool.allocate(num_fresh, group)
            held = [block.id for block in (*prefix.blocks, *fresh)]
            tables.append([GIVEN_BACK] * prefix.first + held if prefix.first else held)
            if prefix.source is not None:
                copies.append(BlockCopy(prefix.source.id, fresh[0].id, prefix.num_copied))
        sequence.set_block_tables(tables)
        if self.has_windows:
            sequence.held_from = [prefix.first for prefix in match.prefixes]
        first, num_full = match.prefix.first, match.prefix.num_full
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_published_blocks = num_full
        sequence.num_admitted_tokens = num_tokens
        for digest in self._uncomputed(sequence):
            self.computing.setdefault(digest, sequence)
        self.residency.reached(sequence, first, num_full)
        return copies

    def reclaim(self, count: int) -> bool:
        """Give up retained blocks until so many can be taken, for a sequence that runs alone; all
        others are admitted with no more than is available. False if none was given up."""
        missing = count - self.pool.num_allocatable
        return missing > 0 and self.retained is not None and self.retained.give_up(missing) > 0

    def retain(self, sequence: Sequence, num_blocks: int, now: float) -> None:
        """Its first blocks, if its request says so; before they are given back."""
        ask = sequence.request.retention
        if ask is not None and self.retained is not None:
            self.retained.retain(sequence.digests[:num_blocks], ask, now)

    def grow(self, sequence: Sequence) -> list[BlockGrowth]:
        """One more block in each group for its next token; nothing if too few are free."""
        if sequence.num_promised_blocks:
            return self.extend(sequence, (len(sequence.block_table) + 1) * BLOCK_SIZE)
        if self.num_available < self.num_groups:
            return []
        place = len(sequence.block_table)
        grown = []
        for group, table in enumerate(sequence.block_tables):
            assert len(table) == place, "it has blocks for all its tokens before it grows"
            block_id = self.pool.allocate(1, group)[0].id
            table.append(block_id)
            grown.append(BlockGrowth(sequence.row, place, block_id, group))
        return grown

    def extend(self, sequence: Sequence, num_tokens: int) -> list[BlockGrowth]:
        """The blocks promised to it that its next chunk writes, which reaches `num_tokens`."""
        end = -(-num_tokens // BLOCK_SIZE)
        grown = []
        for group, table in enumerate(sequence.block_tables):
            missing = end - len(table)
            if missing <= 0:
                continue
            assert missing <= sequence.num_promised_blocks, "more blocks than it was promised"
            for block in self.pool.allocate(missing, group):
                grown.append(BlockGrowth(sequence.row, len(table), block.id, group))
                table.append(block.id)
            sequence.num_promised_blocks -= missing
            self._num_promised -= missing
        return grown

    def trim(self, sequence: Sequence) -> None:
        """Give back what left its windows; what is published stays cached until it is needed."""
        num_blocks = -(-sequence.num_admitted_tokens // BLOCK_SIZE)
        for group, needs in enumerate(self.needs.groups):
            before, first = sequence.held_from[group], needs.first(sequence.num_computed_tokens)
            if first <= before:
                continue
            table = sequence.block_tables[group]
            self._give_back(group, table[before:first])
            table[before:first] = [GIVEN_BACK] * (first - before)
            sequence.held_from[group] = first
            to_come = num_blocks - len(table)
            num_more = needs.promised(len(table) - first, to_come)
            num_more -= needs.promised(len(table) - before, to_come)
            sequence.num_promised_blocks += num_more
            self._num_promised += num_more

    def publish(self, sequence: Sequence) -> None:
        """Let others find its computed blocks; the partly filled last one too, once it caught
        up."""
        if not self._caching:
            return
        digests = sequence.digests
        num_full = sequence.num_computed_tokens // BLOCK_SIZE
        for index in range(sequence.num_published_blocks, num_full):
            tokens = self._tokens(sequence, index)
            media = parts_of(sequence.request.media, index)
            parent = digests[index - 1] if index else sequence.root
            if index == len(digests):
                digests.append(block_digest(parent, tokens, extras=extras_of(media)))
            for cache, table in zip(self.pool.caches, sequence.block_tables, strict=True):
                block = self.pool.blocks[table[index]]
                if not cache.publish(block, parent, tokens, digests[index], media):
                    continue
                if self.saves is not None:
                    self.saves.append(BlockSave(block.id, block.group, digests[index]))
                for listener in cache.listeners:  # of the first group only there are any
                    listener.stored(sequence, index)
            self._computed(digests[index], sequence)
        self.residency.reached(sequence, sequence.num_published_blocks, num_full)
        sequence.num_published_blocks = num_full
        if sequence.state_saves:
            assert self.states is not None
            self.states.publish(sequence)
        if sequence.num_computed_tokens == sequence.num_admitted_tokens:
            self.publish_tail(sequence)
            self._computed(sequence.tail_digest, sequence)

    def publish_tail(self, sequence: Sequence) -> None:
        """Let others find what is computed of its last block, if that is partly filled. It may be
        written further: what is there does not change."""
        index, num_filled = divmod(sequence.num_computed_tokens, BLOCK_SIZE)
        if num_filled == 0 or not self._caching:
            return
        # NOTE: a copy that is planned and not made yet is never published here: its source, pinned
        # till then, holds the same tokens, and the cache keeps only what adds something.
        parent = sequence.digests[index - 1] if index else sequence.root
        tokens = self._tokens(sequence, index)[: num_filled * TOKEN_BYTES]
        media = parts_of(sequence.request.media, index)
        for cache, table in zip(self.pool.caches, sequence.block_tables, strict=True):
            cache.publish(self.pool.blocks[table[index]], parent, tokens, None, media)

    def use_states(self, sequence: Sequence, end: int) -> int:
        """The slot of the snapshot behind its first `end` blocks, from which it goes on. Prompts
        that part there may come again, so tiers get it."""
        assert self.states is not None
        slot = self.states.use(sequence.digests[end - 1])
        self._save_states(sequence, end, slot)
        return slot

    def release(self, sequence: Sequence) -> None:
        """Take its blocks back. What it computed stays cached until the memory is needed."""
        if self._caching and sequence.block_table:
            self.publish_tail(sequence)
            self.residency.ended(sequence)
            if self.states is not None and self.saves is not None:
                self._save_last_states(sequence, self.states)
        self._free(sequence)

    def release_spoiled(self, sequence: Sequence) -> None:
        """Take its blocks back and forget what they hold: its numbers went wrong somewhere, perhaps
        in an earlier chunk, perhaps in blocks that it found; no other sequence may find them."""
        for cache, table in zip(self.pool.caches, sequence.block_tables, strict=True):
            blocks = [self.pool.blocks[block_id] for block_id in table if block_id != GIVEN_BACK]
            if len(blocks) < len(table):  # of those that left the window only the names are left
                named = map(cache.get, sequence.digests)
                blocks += [block for block in named if block is not None]
            for block in blocks:
                if block.parent is not None:
                    cache.retract(block)
        if self.states is not None:
            self.states.retract(sequence.digests)
        if self.saves is not None:
            self.spoiled += sequence.digests
        self._free(sequence)

    def end_step(self) -> None:
        """The step's copies are done: their sources may go."""
        if self.pinned:
            for block in self.pinned:
                self._give_back(block.group, (block.id,))
            self.pinned = []

    def clear_cache(self) -> None:
        """Forget all cached blocks. Only while no sequence holds any."""
        assert all(block.ref_count == 0 for block in self.pool.blocks)
        for cache in self.pool.caches:
            cache.clear()
        if self.states is not None:
            self.states.clear()

    def _save_last_states(self, sequence: Sequence, states: StateSnapshots) -> None:
        """What a text that goes on from it will need. Those before it are as large as this one, and
        not saved: they would take many times the blocks' bytes."""
        if end := states.longest(sequence.digests, sequence.num_published_blocks):
            self._save_states(sequence, end, states.cached[sequence.digests[end - 1]])

    def _save_states(self, sequence: Sequence, end: int, slot: int) -> None:
        if self.saves is not None:
            digest = sequence.digests[end - 1]
            self.saves.append(BlockSave(slot, STATE_GROUP, digest, end * BLOCK_SIZE))

    def _free(self, sequence: Sequence) -> None:
        if sequence.state_saves or sequence.draft_saves:
            assert self.states is not None
            self.states.release(sequence)
        for digest in self._uncomputed(sequence):
            self._computed(digest, sequence)
        for group, table in enumerate(sequence.block_tables):
            held = table[sequence.held_from[group] :] if sequence.held_from else table
            self._give_back(group, reversed(held))
        self._num_promised -= sequence.num_promised_blocks
        sequence.num_promised_blocks = 0
        sequence.set_block_tables([[] for _ in range(self.num_groups)])
        sequence.held_from = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    def _cost(self, prefixes: List[CachedPrefix], total: int) -> int:
        """Of a sequence of `total` blocks, without the copies' sources. A block in a window costs
        the same whether others hold it or not: they may give it back first."""
        num_blocks = 0
        for needs, prefix in zip(self.needs.groups, prefixes, strict=True):
            num_blocks += needs.blocks(total - prefix.first)
            if needs.behind is None:
                num_blocks -= sum(b.ref_count > 0 or b.is_retained for b in prefix.blocks)
        return num_blocks

    def _source_cost(self, prefixes: List[CachedPrefix]) -> int:
        return sum(
            needs.behind is not None or not (prefix.source.ref_count or prefix.source.is_retained)
            for needs, prefix in zip(self.needs.groups, prefixes, strict=True)
            if prefix.source is not None
        )

    def _touch(self, group: int, blocks: Iterable[Block]) -> None:
        if self.has_windows and self.needs.groups[group].behind is not None:
            self._num_promised += sum(block.ref_count > 0 for block in blocks)
        self.pool.touch(blocks)

    def _give_back(self, group: int, block_ids: Iterable[int]) -> None:
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        if self.has_windows and self.needs.groups[group].behind is not None:
            self._num_promised -= sum(block.ref_count > 1 for block in blocks)
        self.pool.free(blocks)

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        return packed_block(sequence, index)

    def _uncomputed(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks it has yet to compute."""
        digests = sequence.digests[sequence.num_published_blocks :]
        if sequence.tail_digest is not None:
            digests.append(sequence.tail_digest)
        return digests

    def _computed(self, digest: bytes | None, sequence: Sequence) -> None:
        if digest is not None and self.computing.get(digest) is sequence:
            del self.computing[digest]
