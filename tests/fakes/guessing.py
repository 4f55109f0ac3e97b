"""A guesser that has the answer, and guesses wrong at a chosen rate."""

from __future__ import annotations

import random


class AnswerGuesser:
    """Guesses from `least` to `most` tokens of `answer`; a share of `honesty` of them is right."""

    def __init__(
        self,
        answer: list[int],
        num_prompt: int,
        *,
        honesty: float = 1.0,
        least: int = 0,
        most: int = 5,
        rng: random.Random | None = None,
    ) -> None:
        self.rate = honesty
        self._answer = answer
        self._num_prompt = num_prompt
        self._least, self._most = least, most
        self._rng = rng or random.Random(0)

    def guess(self, tokens: list[int], /) -> list[int]:
        done = len(tokens) - self._num_prompt
        count = self._rng.randint(self._least, self._most)
        return [
            token if self._rng.random() < self.rate else (token + 1) % 256
            for token in self._answer[done : done + count]
        ]

    def rates(self, count: int, /) -> list[float]:
        return [self.rate] * count
