"""Pages of KV blocks in memory of the host that a device copies from and to by itself."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.tiers.page import Page


class PinnedPages:
    """One piece of memory, pinned as a whole. A page is an array that comes back here when nothing
    refers to it any longer."""

    def __init__(self, num_pages: int, page_bytes: int, *, is_pinned: bool) -> None:
        """Raises ConfigError if there is not so much memory, or it cannot be pinned."""
        self._page_bytes = page_bytes
        num_bytes = num_pages * page_bytes
        try:
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # pinning takes a time for each page of the system
                memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise ConfigError(
                f"{num_bytes / 2**30:.2f} GiB of memory for KV blocks are not available: "
                f"{error.strerror}; lower --kv-offloading-size"
            ) from None
        self._memory = memoryview(memory)
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._is_pinned = is_pinned
        if is_pinned:
            self._pin(num_bytes)
        self._free = deque(range(num_pages))  # whose ends any thread may use: pages end anywhere
        self._places: dict[int, int] = {}  # of the pages that are in use, by address

    def __len__(self) -> int:
        """Pages that `take` gives now."""
        return len(self._free)

    def take(self) -> Page | None:
        """A page without content; None if all are in use."""
        try:
            place = self._free.popleft()
        except IndexError:
            return None
        start = place * self._page_bytes
        page: Page = np.frombuffer(self._memory[start : start + self._page_bytes], np.uint8)
        self._places[page.ctypes.data] = place
        ending = weakref.finalize(page, self._give_back, page.ctypes.data)
        ending.atexit = False
        return page

    def has(self, page: Page) -> bool:
        return page.ctypes.data in self._places

    def close(self) -> None:
        """Pages that are in use stay valid, and are not pinned any longer."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]

    def _give_back(self, address: int) -> None:
        self._free.append(self._places.pop(address))

    def _pin(self, num_bytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            raise ConfigError(
                f"{num_bytes / 2**30:.2f} GiB of memory for KV blocks cannot be pinned (CUDA error "
                f"{int(error)}): lower --kv-offloading-size, or allow more locked memory"
            )
