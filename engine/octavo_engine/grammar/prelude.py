"""The wait for the text after which a grammar begins, such as the end of a model's reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.grammar.vocabulary import Vocabulary


class BeforeMasks:
    """The masks while one text is waited for, by how much of it is there. Shared; each is made
    once."""

    def __init__(self, vocabulary: Vocabulary, after: bytes) -> None:
        self.after = after
        self.words = vocabulary.words
        self._vocabulary = vocabulary
        self._masks: dict[int, NDArray[np.uint32]] = {}
        self._fallback = _fallbacks(after)
        self.mask(0)

    def mask(self, state: int) -> NDArray[np.uint32]:
        mask = self._masks.get(state)
        if mask is None:
            mask = self._masks[state] = self._vocabulary.mask_before(self.after, state)
        return mask

    def follow(self, state: int, token: int) -> int:
        """How much of the text is there after one more token; its length: all of it."""
        after, end = self.after, len(self.after)
        for byte in self.words[token]:
            while state and after[state] != byte:
                state = self._fallback[state]
            state += after[state] == byte
            if state == end:
                return end
        return state


def _fallbacks(text: bytes) -> list[int]:
    """By length of a beginning: the longest shorter one that it ends with."""
    fallbacks = [0] * (len(text) + 1)
    state = 0
    for place in range(1, len(text)):
        while state and text[state] != text[place]:
            state = fallbacks[state]
        state += text[state] == text[place]
        fallbacks[place + 1] = state
    return fallbacks
