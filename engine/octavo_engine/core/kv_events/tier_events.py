"""KV events of the tiers: which blocks lie in host memory and on disk, under vLLM's names."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.kv_events import BlockRemoved, BlockStored
from octavo_engine.protocol.prefix_hash import vllm_event_id
from octavo_engine.tiers.page import split_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from octavo_engine.protocol.kv_events import Event
    from octavo_engine.tiers.page import BlockName, OnChange

MAX_RECENT = 1 << 16  # blocks that left the pool, and may be on their way to disk


class TierEvents:
    """Stores report on any thread; all else is called on the engine's.

    As vLLM does for memory beside the device's, an event names blocks without their tokens: the
    event of the pool said those. A block that was there before the engine started, or was never in
    its pool, has no name of vLLM's and is left out.
    """

    def __init__(self, in_pool: Mapping[bytes, bytes]) -> None:
        """`in_pool` are vLLM's names of the blocks in the pool, kept up to date by its owner."""
        self._in_pool = in_pool
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()  # that left it, oldest first
        self._held: dict[tuple[str, bytes], bytes] = {}  # by medium and digest
        self._changes: deque[tuple[str, BlockName, bool]] = deque()

    def reports_of(self, medium: str) -> OnChange:
        """What the store of a medium calls."""

        def report(name: BlockName, is_there: bool) -> None:
            self._changes.append((medium, name, is_there))

        return report

    def left_pool(self, digest: bytes, name: bytes) -> None:
        self._recent[digest] = name
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def take(self) -> list[Event]:
        """What changed since the last call."""
        events: list[Event] = []
        for medium, digest, is_there in self._drain():
            key = (medium, digest)
            if is_there and key not in self._held:
                known = self._in_pool.get(digest) or self._recent.get(digest)
                if known is not None:
                    self._held[key] = known
                    _add_stored(events, medium, known)
            elif not is_there and (known := self._held.pop(key, None)) is not None:
                _add_removed(events, medium, known)
        return events

    def all_stored(self) -> list[Event]:
        """What is there, after an event that says that nothing is."""
        events: list[Event] = []
        for (medium, _), name in self._held.items():
            _add_stored(events, medium, name)
        return events

    def _drain(self) -> Iterator[tuple[str, bytes, bool]]:
        while self._changes:
            medium, name, is_there = self._changes.popleft()
            digest, group = split_name(name)
            if group == 0:  # events are of the first group of layers, as the pool's
                yield medium, digest, is_there


def _add_stored(events: list[Event], medium: str, name: bytes) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlockStored) and last.medium == medium:
        last.block_hashes.append(vllm_event_id(name))
        return
    events.append(
        BlockStored(
            block_hashes=[vllm_event_id(name)],
            parent_block_hash=None,
            token_ids=[],
            block_size=BLOCK_SIZE,
            medium=medium,
            group_idx=0,
        )
    )


def _add_removed(events: list[Event], medium: str, name: bytes) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlockRemoved) and last.medium == medium:
        last.block_hashes.append(vllm_event_id(name))
    else:
        events.append(BlockRemoved([vllm_event_id(name)], medium, group_idx=0))
