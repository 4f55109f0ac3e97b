"""Notices that an answer has begun to say the same tokens over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.state.sampling_params import RepetitionDetection


class RepetitionWatch:
    """One answer's. A pattern of s tokens has come c times in a row once the last s * (c - 1)
    tokens each equal the one s places before: one counter a size is all that has to be kept."""

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1)
        self._needed = [size * (wanted.min_count - 1) for size in self._sizes]
        self._equal = [0] * len(self._sizes)
        self._recent: list[int] = []

    def push(self, token: int) -> bool:
        """Whether this token completes a repetition. Hot path where it is requested."""
        recent, equal = self._recent, self._equal
        found = False
        for place, size in enumerate(self._sizes):
            if size > len(recent) or recent[-size] != token:
                equal[place] = 0
                continue
            equal[place] += 1
            found |= equal[place] >= self._needed[place]
        recent.append(token)
        if len(recent) > 4 * self._sizes.stop:
            del recent[: -self._sizes.stop]
        return found

    def cut(self, tokens: list[int]) -> int | None:
        """How many of these tokens there are up to the end of a repetition; None: there is none."""
        for count, token in enumerate(tokens, 1):
            if self.push(token):
                return count
        return None
