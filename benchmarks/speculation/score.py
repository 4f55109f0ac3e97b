"""How well heads guess what a model wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_TARGET = -1  # the answer had ended, or the heads do not know the token


class Score(NamedTuple):
    right: list[float]  # how often each head, or pass, is
    acceptance_length: float  # tokens of a step, where each counts if all before it are right

    @classmethod
    def of(cls, is_right: NDArray[np.bool_]) -> Score:
        """[heads or passes, places]."""
        accepted = np.logical_and.accumulate(is_right, axis=0).sum(axis=0)
        return cls([float(one.mean()) for one in is_right], 1 + float(accepted.mean()))

    def describe(self) -> str:
        rights = ", ".join(f"{right:.1%}" for right in self.right)
        return f"right {rights}; acceptance length {self.acceptance_length:.2f}"
