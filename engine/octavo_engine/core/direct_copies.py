"""Copies of KV blocks on a backend whose caller waits for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.backends.backend import MovesKV, PageCopy
    from octavo_engine.tiers.page import Page

# What is assumed before anything was loaded: low, so that no more than a little time can be lost.
LATENCY_S, BYTES_PER_S = 1e-3, 2e9


class DirectCopy(NamedTuple):
    """Done when it begins."""

    pages: list[Page]
    is_done: bool = True
    is_failed: bool = False
    seconds: float = 0.0


class DirectCopies:
    """Answers to `backend.BlockCopies`."""

    latency_s, bytes_per_s = LATENCY_S, BYTES_PER_S
    num_saves_free = num_loads_free = sys.maxsize

    def __init__(self, mover: MovesKV, *, num_together: int = 1) -> None:
        """`num_together`: blocks whose copies may be one piece of memory. It takes a third of the
        time, since large pieces have large pages, but is given back when the last of them goes."""
        self._mover, self._num_together = mover, num_together

    def begin_save(self, block_ids: Sequence[int]) -> DirectCopy:
        pages: list[Page] = []
        for at in range(0, len(block_ids), self._num_together):
            pages += self._mover.save_blocks(block_ids[at : at + self._num_together])
        return DirectCopy(pages)

    def begin_load(self, pages: Sequence[Page]) -> DirectCopy:
        return DirectCopy(list(pages))

    def place(self, copy: PageCopy, block_ids: Sequence[int]) -> None:
        wanted = [(i, page) for i, page in zip(block_ids, copy.pages, strict=True) if i >= 0]
        self._mover.load_blocks([i for i, _ in wanted], [page for _, page in wanted])

    def drop(self, copy: PageCopy) -> None:
        pass

    def close(self) -> None:
        pass
