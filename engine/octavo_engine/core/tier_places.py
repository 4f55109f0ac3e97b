"""Which tier a block lies in, for the labels that routers follow."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo_engine.kv.outside_blocks import IN_POOL
from octavo_engine.protocol.kv_events import TIER_MEDIA
from octavo_engine.tiers.page import block_name, split_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from octavo_engine.tiers.host_store import HostStore
    from octavo_engine.tiers.page import BlockName
    from octavo_engine.tiers.run_store import RunStore


class StoredPlaces:
    """TierPlaces of the stores at hand. They report on any thread; all else is called on one."""

    def __init__(self, stores: Mapping[str, HostStore | RunStore]) -> None:
        """By medium, the quickest first."""
        self._stores: list[tuple[int, Container[BlockName]]] = []
        self._changed: deque[bytes] = deque()  # its ends are safe to use from any thread
        for medium, store in stores.items():
            self._stores.append((TIER_MEDIA.index(medium) + 1, store))
            store.listeners.append(self._report)

    def place_of(self, digest: bytes) -> int:
        name = block_name(digest, 0)
        return next((place for place, store in self._stores if name in store), IN_POOL)

    def take_changed(self) -> Iterator[bytes]:
        while self._changed:
            yield self._changed.popleft()

    def _report(self, name: BlockName, is_there: bool) -> None:
        digest, group = split_name(name)
        if group == 0:
            self._changed.append(digest)
