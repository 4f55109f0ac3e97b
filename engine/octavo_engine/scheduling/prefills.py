"""The sequences of a step whose prompts are still to be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence


class Prefills:
    """The sequences of a step that are more than one token behind, by what their tokens are paid
    from: the step's budget, their request's share of the time, or the background's."""

    __slots__ = ("background", "regular", "shared")

    def __init__(self) -> None:
        self.regular: list[Sequence] = []
        self.shared: list[Sequence] = []
        self.background: list[Sequence] = []  # empty while no foreground sequence runs

    def __bool__(self) -> bool:
        return bool(self.regular or self.shared or self.background)

    def add(self, sequence: Sequence, *, is_shared: bool, is_background: bool) -> None:
        if is_shared:
            self.shared.append(sequence)
        elif is_background:
            self.background.append(sequence)
        else:
            self.regular.append(sequence)

    def all(self) -> list[Sequence]:
        return self.regular + self.shared + self.background
