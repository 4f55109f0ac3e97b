"""KV blocks in the host's memory: a bounded store that drops what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.tiers.page import BlockName, OnChange, Page


class HostStore:
    """Never holds more than `max_bytes` of pages. One thread owns it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.listeners: list[OnChange] = []
        self.num_bytes = 0
        self._pages: OrderedDict[BlockName, Page] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    def put(self, name: BlockName, page: Page) -> None:
        """Hold a page; others go if there is no room. One larger than the store is not taken."""
        if name in self._pages:
            self._pages.move_to_end(name)
            return
        if page.nbytes > self.max_bytes:
            return
        while self.num_bytes + page.nbytes > self.max_bytes:
            gone, dropped = self._pages.popitem(last=False)
            self.num_bytes -= dropped.nbytes
            self._report(gone, is_there=False)
        self._pages[name] = page
        self.num_bytes += page.nbytes
        self._report(name, is_there=True)

    def get(self, name: BlockName) -> Page | None:
        page = self._pages.get(name)
        if page is not None:
            self._pages.move_to_end(name)
        return page

    def drop(self, names: Iterable[BlockName]) -> None:
        for name in names:
            page = self._pages.pop(name, None)
            if page is not None:
                self.num_bytes -= page.nbytes
                self._report(name, is_there=False)

    def _report(self, name: BlockName, *, is_there: bool) -> None:
        for listener in self.listeners:
            listener(name, is_there)
