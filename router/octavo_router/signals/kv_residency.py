"""Blocks that a plain server says it holds, as route keys of prompts given as token ids.

A block event has the tokens of each block, and a route key of the form `ids` names sixteen
tokens and all before them. So for prompts given as token ids the two are the same thing, and
nothing but the events is needed. For prompts given as text they are not: only a tokenizer knows
which tokens a text becomes, and the router has none. Those go by the router's own history
(ResidencyIndex.assume), which events still correct in the one way that is sound: a server that
cleared its cache holds nothing.

Only blocks of full attention count, and in the index only those in the GPU's memory; the keys of
blocks in slower memory are kept apart (signals.kv_tier_keys). Two blocks may stand for one key (two
copies, or equal tokens with an image between them that we cannot see), so keys are counted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.route_keys import CHUNK_BYTES, canonical, chain
from octavo_router.signals.kv_events import BlockId, Cleared, Event, Removed, Stored
from octavo_router.signals.kv_tier_keys import MEDIA, KvTierKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.metrics import LabelledCounter
    from octavo_router.signals.interfaces import ResidencySink

TOKEN_BYTES = 4
MAX_BLOCKS = 1_000_000
MAX_PARKED = 10_000  # events whose parent is not known yet

_Id = tuple[int, BlockId]


@dataclass(slots=True)
class _Block:
    """A block and how its chain continues."""

    copies: int
    keys: list[int]  # that end in this block
    last_key: int  # the chain's last key up to here; the root before the first
    rest: bytes  # of the data, behind that key
    num_tokens: int  # up to the block's end
    is_opaque: bool = False  # holds more than tokens (an image): no key can name it or its children


class KvResidency:
    """The blocks of one server. `apply` writes what follows from a batch into the index."""

    def __init__(self, index: ResidencySink, slot: int, tally: LabelledCounter) -> None:
        self._index = index
        self._slot = slot
        self._tally = tally
        self.tiers = KvTierKeys()
        self._blocks: dict[_Id, _Block] = {}
        self._references: dict[int, int] = {}
        self._parked: dict[_Id, list[Stored]] = {}
        self._num_parked = 0
        self._stored: dict[int, int] = {}  # of the batch at hand: key to tokens
        self._evicted: dict[int, None] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def apply(self, events: Sequence[Event]) -> None:
        self._stored.clear()
        self._evicted.clear()
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self._tally.add("cleared", "applied")
                    self.clear()
        if self._stored or self._evicted:
            stored = b"".join(struct.pack("<QI", *pair) for pair in self._stored.items())
            evicted = struct.pack(f"<{len(self._evicted)}Q", *self._evicted)
            self._index.apply(self._slot, stored, evicted)

    def clear(self) -> None:
        """Nothing is known to be there, our own history of it included."""
        self._blocks.clear()
        self._references.clear()
        self._parked.clear()
        self._num_parked = 0
        self._stored.clear()
        self._evicted.clear()
        self.tiers.clear()
        self._index.clear(self._slot)

    def _store(self, event: Stored) -> None:
        if event.medium in MEDIA:
            self._store_in_tier(event)
            return
        has_tokens = len(event.token_ids) == len(event.hashes) * event.block_size
        if event.medium != "GPU" or event.kind != "full_attention" or not has_tokens:
            self._tally.add("stored", "ignored")
            return
        if event.parent is None:
            parent = _beginning(event)
        else:
            known = self._blocks.get((event.group, event.parent))
            if known is None:
                self._park(event, (event.group, event.parent))
                return
            parent = known
        self._tally.add("stored", "applied")
        for number, hash_ in enumerate(event.hashes):
            parent = self._store_block(event, number, (event.group, hash_), parent)

    def _store_block(self, event: Stored, number: int, id_: _Id, parent: _Block) -> _Block:
        known = self._blocks.get(id_)
        if known is not None:
            known.copies += 1
            return known
        size = event.block_size
        ids = event.token_ids[number * size : (number + 1) * size]
        is_opaque = parent.is_opaque or _is_opaque(event, number)
        data = parent.rest + struct.pack(f"<{size}I", *ids)
        keys = [] if is_opaque else chain(parent.last_key, data)
        num_tokens = parent.num_tokens + size
        block = _Block(
            copies=1,
            keys=keys,
            last_key=keys[-1] if keys else parent.last_key,
            rest=data[len(keys) * CHUNK_BYTES :] if not is_opaque else b"",
            num_tokens=num_tokens,
            is_opaque=is_opaque,
        )
        if len(self._blocks) >= MAX_BLOCKS:
            self._tally.add("stored", "dropped")
            return block
        self._blocks[id_] = block
        first = (num_tokens * TOKEN_BYTES - len(block.rest)) // CHUNK_BYTES - len(keys)
        for at, key in enumerate(keys, start=first + 1):
            self._refer(key, at * CHUNK_BYTES // TOKEN_BYTES)
        self._unpark(id_)
        return block

    def _store_in_tier(self, event: Stored) -> None:
        result = "ignored"
        for hash_ in event.hashes:
            id_ = (event.group, hash_)
            block = self._blocks.get(id_)
            keys = self.tiers.keys_of(id_) if block is None else block.keys
            if keys and self.tiers.store(id_, keys, event.medium):
                result = "applied"
        self._tally.add("stored", result)

    def _remove_from_tier(self, event: Removed) -> None:
        for hash_ in event.hashes:
            self.tiers.remove((event.group, hash_), event.medium)

    def _remove(self, event: Removed) -> None:
        if event.medium in MEDIA:
            self._remove_from_tier(event)
            return
        if event.medium != "GPU":
            return
        self._tally.add("removed", "applied")
        for hash_ in event.hashes:
            id_ = (event.group, hash_)
            block = self._blocks.get(id_)
            if block is None:
                continue
            block.copies -= 1
            if block.copies == 0:
                del self._blocks[id_]
                for key in block.keys:
                    self._release(key)

    def _refer(self, key: int, num_tokens: int) -> None:
        count = self._references.get(key, 0)
        self._references[key] = count + 1
        if count == 0:
            self._stored[key] = num_tokens  # also if evicted above: the index evicts first

    def _release(self, key: int) -> None:
        count = self._references[key] - 1
        if count:
            self._references[key] = count
            return
        del self._references[key]
        self._stored.pop(key, None)
        self._evicted[key] = None

    def _park(self, event: Stored, parent: _Id) -> None:
        """Its parent may come later; some publishers reorder. It is never guessed at."""
        if self._num_parked >= MAX_PARKED:
            self._tally.add("stored", "dropped")
            return
        self._tally.add("stored", "parked")
        self._num_parked += 1
        self._parked.setdefault(parent, []).append(event)

    def _unpark(self, id_: _Id) -> None:
        for event in self._parked.pop(id_, ()):
            self._num_parked -= 1
            self._store(event)


def _beginning(event: Stored) -> _Block:
    """Before the first block: the root, which the adapter and the salt are part of."""
    salt = ""
    for extra in _extras(event, 0):
        if isinstance(extra, list | tuple) and len(extra) == 2 and extra[0] == "cache_salt":
            salt = str(extra[1])
    body = {"prompt": [], "cache_salt": salt}
    reduced = canonical(body, kind="completion", adapter=event.lora_name)
    assert reduced is not None
    return _Block(1, [], reduced.root, b"", 0)


def _is_opaque(event: Stored, number: int) -> bool:
    """An extra key other than adapter and salt: something that token ids do not tell."""
    return any(
        not (isinstance(extra, list | tuple) and extra and extra[0] in ("lora", "cache_salt"))
        for extra in _extras(event, number)
        if extra
    )


def _extras(event: Stored, number: int) -> Sequence[Any]:
    """The extra keys of one block. Old publishers tell none, or bare values instead of pairs."""
    if event.extra_keys is None or number >= len(event.extra_keys):
        return ()
    extras = event.extra_keys[number]
    return extras if isinstance(extras, list | tuple) else ()
