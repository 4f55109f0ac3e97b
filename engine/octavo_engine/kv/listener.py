"""The interface of parts that follow what the prefix cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence


class CacheListener(Protocol):
    """Called when it happens, on the scheduler's thread; full blocks only."""

    def stored(self, sequence: Sequence, index: int) -> None:
        """Block `index` of the sequence was computed and can be found from now on."""

    def removed(self, digest: bytes, parent: bytes) -> None:
        """The block of that name, which followed `parent`, can be found no longer."""

    def cleared(self) -> None:
        """No block can be found any longer."""
