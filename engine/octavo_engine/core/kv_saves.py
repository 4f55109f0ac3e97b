"""Blocks that were computed, on their way to the tiers."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.caches import STATE_GROUP
from octavo_engine.tiers.page import block_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo_engine.backends.backend import BlockCopies, MovesStates, PageCopy
    from octavo_engine.kv.manager import BlockSave, KVManager
    from octavo_engine.tiers.page import BlockName, Page

FLUSH_PAUSE_S = 0.0005


class SaveUnderWay(NamedTuple):
    names: list[BlockName | None]  # None: it proved wrong meanwhile
    copy: PageCopy


class BlockSaves:
    """As many are copied at a time as there is room for; the others wait in the pool, and those
    that are overwritten there meanwhile are not saved. States are few, and copied at once."""

    def __init__(
        self,
        kv: KVManager,
        copies: BlockCopies,
        *,
        is_stored: Callable[[BlockName], bool],
        store: Callable[[BlockName, Page], None],
        states: MovesStates | None = None,
    ) -> None:
        """`is_stored`: nothing is left to be done for a block. `store` is called by `advance`, and
        for `states` by `add`."""
        self._kv, self._copies, self._states = kv, copies, states
        self._is_stored, self._store = is_stored, store
        self._waiting: deque[BlockSave] = deque()
        self._under_way: deque[SaveUnderWay] = deque()
        self.saved_bytes = 0
        self.num_unsaved = 0

    def __bool__(self) -> bool:
        return bool(self._waiting) or bool(self._under_way)

    def add(self, saves: Iterable[BlockSave]) -> None:
        for save in saves:
            if save.group == STATE_GROUP:
                self._save_states(save)
            else:
                self._waiting.append(save)
        while len(self._waiting) > len(self._kv.pool.blocks):  # most of them are overwritten
            self._waiting.popleft()
            self.num_unsaved += 1

    def drop(self, names: Sequence[BlockName]) -> None:
        """Blocks that must not be found: the pool has forgotten them, copies have not."""
        spoiled = set(names)
        for save in self._under_way:
            save.names[:] = [None if name in spoiled else name for name in save.names]

    def advance(self) -> None:
        """Take in what is copied, and begin with more. Copies end in the order of their begin."""
        self._land()
        while self._waiting and (room := self._copies.num_saves_free) > 0:
            names, block_ids = self._next(room)
            if not names:
                break
            self._under_way.append(SaveUnderWay(names, self._copies.begin_save(block_ids)))
        self._land()

    def flush(self, timeout_s: float) -> None:
        """Wait until all that the pool still has is saved."""
        end = time.monotonic() + timeout_s
        while self and time.monotonic() < end:
            self.advance()
            if self:
                time.sleep(FLUSH_PAUSE_S)

    def _next(self, most: int) -> tuple[list[BlockName | None], list[int]]:
        names: list[BlockName | None] = []
        block_ids: list[int] = []
        while self._waiting and len(names) < most:
            save = self._waiting.popleft()
            name = block_name(save.digest, save.group)
            if self._is_stored(name):
                continue
            if self._kv.pool.blocks[save.block_id].digest != save.digest:
                self.num_unsaved += 1
                continue
            names.append(name)
            block_ids.append(save.block_id)
        return names, block_ids

    def _land(self) -> None:
        while self._under_way and self._under_way[0].copy.is_done:
            names, copy = self._under_way.popleft()
            if copy.is_failed:
                self.num_unsaved += len(names)
                continue
            for name, page in zip(names, copy.pages, strict=True):
                if name is not None:
                    self._keep(name, page)

    def _save_states(self, save: BlockSave) -> None:
        name = block_name(save.digest, STATE_GROUP)
        if self._is_stored(name):
            return
        assert self._states is not None and self._kv.states is not None
        if self._kv.states.cached.get(save.digest) != save.block_id:  # overwritten meanwhile
            self.num_unsaved += 1
            return
        self._keep(name, self._states.save_states(save.block_id))

    def _keep(self, name: BlockName, page: Page) -> None:
        self.saved_bytes += page.nbytes
        self._store(name, page)
