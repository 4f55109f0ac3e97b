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

    def __init__(
        self,
        vocabulary: Vocabulary,
        after: bytes,
        *,
        budget: int | None = None,
        opens: tuple[bytes, ...] = (),
    ) -> None:
        self.after = after
        self.budget = budget
        self.opens = opens
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

    def closing(self, state: int) -> NDArray[np.uint32]:
        """The longest token that goes on with the text, and no other; no bounds if none does."""
        rest = self.after[state:]
        place = -1 - state
        mask = self._masks.get(place)
        if mask is None:
            fitting = [i for i, word in enumerate(self.words) if word and rest.startswith(word)]
            longest = sorted(fitting, key=lambda i: len(self.words[i]))[-1:]
            mask = self._vocabulary.mask_of(longest) if longest else self.mask(state)
            self._masks[place] = mask
        return mask

    def anything(self) -> NDArray[np.uint32]:
        """While it is not known whether there is anything to wait for."""
        return self.mask(0) | self._vocabulary.ends

    def follow(self, state: int, word: bytes) -> int:
        """How much of the text is there after one more token; its length: all of it."""
        after, end = self.after, len(self.after)
        for byte in word:
            while state and after[state] != byte:
                state = self._fallback[state]
            state += after[state] == byte
            if state == end:
                return end
        return state


class Prelude:
    """One answer's wait. Where it has a budget, that many tokens, then the text is forced."""

    __slots__ = ("_head", "_left", "_masks", "_state")

    def __init__(self, masks: BeforeMasks) -> None:
        self._masks = masks
        self._state = 0
        self._left = masks.budget
        self._head: bytes | None = b"" if masks.opens else None  # of an answer not yet understood

    @property
    def mask(self) -> NDArray[np.uint32]:
        if self._head is not None:
            return self._masks.anything()
        if self._left is not None and self._left <= 0:
            return self._masks.closing(self._state)
        return self._masks.mask(self._state)

    def follow(self, token: int) -> bool:
        """One token more; true once the wait is over."""
        word = self._masks.words[token]
        if self._head is not None:
            self._head = (self._head + word).lstrip()
            mark = next((mark for mark in self._masks.opens if self._head.startswith(mark)), None)
            if mark is None:
                return not any(mark.startswith(self._head) for mark in self._masks.opens)
            word, self._head = self._head[len(mark) :], None
        elif self._left is not None:
            self._left -= 1
        self._state = self._masks.follow(self._state, word)
        return self._state == len(self._masks.after)


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
