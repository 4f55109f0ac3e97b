"""KV events in vLLM's format, from what the prefix cache reports: which block came, which went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core.kv_events.tier_events import TierEvents
from octavo_engine.protocol.kv_events import (
    FULL_ATTENTION,
    MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from octavo_engine.protocol.prefix_hash import vllm_block_hash, vllm_event_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.protocol.kv_events import Event
    from octavo_engine.state.sequence import Sequence


class KVEventRecorder:
    """A CacheListener. Blocks get the names that vLLM's sha256_cbor recipe gives them, so that what
    consumes vLLM's events sees one cache, whichever engine computed it."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._events: list[Event] = []
        self._hashes: dict[bytes, bytes] = {}  # vLLM's name of each block that is cached
        self._tiers: TierEvents | None = None

    def follow_tiers(self) -> TierEvents:
        """Report what tiers hold too: where they are to say so."""
        self._tiers = TierEvents(self._hashes)
        return self._tiers

    def stored(self, sequence: Sequence, index: int) -> None:
        parent = self._hash_before(sequence, index)
        tokens = sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        extra = _extra_keys(sequence, index)
        digest = vllm_block_hash(parent, tokens, extra)
        self._hashes[sequence.digests[index]] = digest
        parent_id = None if parent is None else vllm_event_id(parent)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and index and last.block_hashes[-1] == parent_id:
            last.block_hashes.append(vllm_event_id(digest))
            last.token_ids += tokens
            if extra is not None and last.extra_keys is None:
                last.extra_keys = [None] * (len(last.block_hashes) - 1)
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            return
        self._events.append(
            BlockStored(
                block_hashes=[vllm_event_id(digest)],
                parent_block_hash=parent_id,
                token_ids=list(tokens),
                block_size=BLOCK_SIZE,
                medium=MEDIUM,
                lora_name=None
                if sequence.request.adapter is None
                else sequence.request.adapter.name,
                extra_keys=None if extra is None else [extra],
                group_idx=0,
                kv_cache_spec_kind=FULL_ATTENTION,
            )
        )

    def removed(self, digest: bytes, parent: bytes) -> None:
        name = self._hashes.pop(digest, None)
        if name is None:
            return
        if self._tiers is not None:
            self._tiers.left_pool(digest, name)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(vllm_event_id(name))
        else:
            self._events.append(BlockRemoved([vllm_event_id(name)], MEDIUM, group_idx=0))

    def cleared(self) -> None:
        self._hashes.clear()
        self._events.append(AllBlocksCleared())
        if self._tiers is not None:  # they keep what they have
            self._events += self._tiers.all_stored()

    def take(self) -> KVEventBatch | None:
        """What happened since the last call; None if nothing did."""
        if self._tiers is not None:
            self._events += self._tiers.take()
        if not self._events:
            return None
        events, self._events = self._events, []
        return KVEventBatch(self._now(), events)

    def _hash_before(self, sequence: Sequence, index: int) -> bytes | None:
        """vLLM's name of the block before. Computed again where that was evicted meanwhile."""
        if index == 0:
            return None
        known = self._hashes.get(sequence.digests[index - 1])
        if known is not None:
            return known
        digest: bytes | None = None
        for place in range(index):
            tokens = sequence.token_ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
            digest = vllm_block_hash(digest, tokens, _extra_keys(sequence, place))
        return digest


def _extra_keys(sequence: Sequence, index: int) -> tuple[Any, ...] | None:
    request = sequence.request
    keys: list[tuple[str, ...]] = []
    if request.adapter is not None:
        keys.append(("lora", request.adapter.name, request.adapter.path))
    if request.cache_salt and index == 0:
        keys.append(("cache_salt", request.cache_salt))
    keys += [
        (part.kind, part.digest.hex())
        for part in request.media
        if part.first < (index + 1) * BLOCK_SIZE and part.end > index * BLOCK_SIZE
    ]
    return tuple(keys) or None
