"""How often each expert of each layer was chosen, reported now and then: thousands of figures are
too many for every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Counts: TypeAlias = "list[list[int]]"  # by layer and expert

EVERY_S = 1.0


class ExpertLayers:
    """Counts since the warm-up: once in `EVERY_S`, and when the engine has nothing to do."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before: Counts = []
        self._next_at = 0.0

    def forget(self, counts: Counts) -> None:
        """What was counted so far."""
        self._before = counts

    def take(self, counts: Callable[[], Counts], *, is_idle: bool) -> Counts:
        """Empty where they are not due."""
        if not is_idle and self._now() < self._next_at:
            return []
        self._next_at = self._now() + EVERY_S
        found = counts()
        if not self._before:
            return found
        return [
            [count - old for count, old in zip(layer, before, strict=True)]
            for layer, before in zip(found, self._before, strict=True)
        ]
